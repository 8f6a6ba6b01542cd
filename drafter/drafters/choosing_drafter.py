"""`auto`: several drafters, of which one drafts at a time. A budget chooses it by what it brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drafter.drafters.contract import Ask, DraftContext, Drafter, Renewal
from drafter.drafters.merged import MergedDrafter
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import merge


class ChoosingDrafter(MergedDrafter):
    """Lets one of its members propose. All of them hear what happens to the sequences, so that each can at any step.

    A member that reads hidden states reads what has come since it drafted last.

    Args:
        drafters: The drafters by name. Each is a member.
        together: Drafters whose merged trees are a member, too, named `a+b`.
    """

    def __init__(self, drafters: Mapping[str, Drafter], together: Sequence[tuple[str, ...]] = ()) -> None:
        super().__init__(*drafters.values())
        self.members = (*drafters, *map("+".join, together))
        self._parts = [(one,) for one in self.drafters] + [tuple(drafters[name] for name in one) for one in together]
        self._chosen = 0

    @property
    def withheld(self) -> tuple[int, ...]:
        """Those of whose drafters one has nothing to draft with."""
        return tuple(place for place, parts in enumerate(self._parts) if not all(one.drafts for one in parts))

    @property
    def version(self) -> int | None:
        """That of the member which drafts."""
        return next((one.version for one in self._parts[self._chosen] if one.version is not None), None)

    def renew(self) -> Renewal | None:
        """Renew all, and say which members that changes."""
        renewed = {place: found for place, one in enumerate(self.drafters) if (found := one.renew()) is not None}
        if not renewed:
            return None
        changed = [self.drafters[place] for place in renewed]
        members = (place for place, parts in enumerate(self._parts) if any(one in parts for one in changed))
        return Renewal(next(iter(renewed.values())).version, tuple(members))

    def select(self, member: int) -> None:
        """Choose who drafts."""
        self._chosen = member

    def prepare(self, context: DraftContext) -> None:
        """Prepare the chosen one."""
        for drafter in self._parts[self._chosen]:
            drafter.prepare(self._seen_by(drafter, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]` of the chosen one."""
        trees = [
            drafter.propose(
                self._seen_by(drafter, context), replace(ask, nodes=min(ask.nodes, drafter.spec.max_nodes), member=0)
            )
            for drafter in self._parts[self._chosen]
        ]
        whole = len(trees) == 1 and trees[0].size > ask.nodes
        return trees[0] if whole else merge(trees, self.spec.max_depth, ask.nodes + 1)

"""Drafters made of several: `a+b` merges their trees, `auto` lets one of them propose at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftMemory, DraftSpec, Renewal, SlotState
from drafter.tree.token_tree import TokenTree, merge


def _told_to_all(event: str) -> Callable[..., None]:
    def tell(self: MergedDrafter, *arguments: Any) -> None:
        for drafter in self.drafters:
            getattr(drafter, event)(*arguments)

    return tell


class MergedDrafter(Drafter):
    """`a+b`: merges the trees of all drafters by the largest probability, and keeps the best nodes."""

    open = _told_to_all("open")
    observe = _told_to_all("observe")
    remember = _told_to_all("remember")
    receive = _told_to_all("receive")
    offer = _told_to_all("offer")
    target_changed = _told_to_all("target_changed")

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters
        self._chosen = 0
        specs = [drafter.spec for drafter in drafters]
        self.spec = DraftSpec(
            max_nodes=max(spec.max_nodes for spec in specs),
            max_depth=max(spec.max_depth for spec in specs),
            hidden_layers=tuple(dict.fromkeys(layer for spec in specs for layer in spec.hidden_layers)),
            graph_safe=all(spec.graph_safe for spec in specs),
            bounded=any(spec.bounded for spec in specs),
            bytes_per_token=sum(spec.bytes_per_token for spec in specs),
            run=max(spec.run for spec in specs),
        )

    @property
    def slots(self) -> Sequence[SlotState]:  # type: ignore[override]
        return [state for drafter in self.drafters for state in drafter.slots]

    @property
    def _groups(self) -> Sequence[tuple[Drafter, ...]]:
        """Groups of drafters, by member; one of them proposes at a time."""
        return (self.drafters,)

    @property
    def version(self) -> int | None:
        """Version of the first of the drafting ones whose weights change."""
        return next((one.version for one in self._groups[self._chosen] if one.version is not None), None)

    @property
    def memory(self) -> DraftMemory:
        memories = [drafter.memory for drafter in self.drafters]
        return DraftMemory(
            sum(one.tokens for one in memories),
            sum(one.nbytes for one in memories),
            max(one.room for one in memories),
        )

    def follows(self, ask: Ask) -> bool:
        return any(one.follows(replace(ask, member=0)) for one in self._groups[ask.member])

    def prepare(self, context: DraftContext) -> None:
        for drafter in self._groups[self._chosen]:
            drafter.prepare(self._seen_by(drafter, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        trees = [
            drafter.propose(
                self._seen_by(drafter, context), replace(ask, nodes=min(ask.nodes, drafter.spec.max_nodes), member=0)
            )
            for drafter in self._groups[self._chosen]
        ]
        whole = len(trees) == 1 and trees[0].size > ask.nodes
        return trees[0] if whole else merge(trees, self.spec.max_depth, ask.nodes + 1)

    def renew(self) -> Renewal | None:
        renewals = [(drafter, drafter.renew()) for drafter in self.drafters]
        changed = [drafter for drafter, renewal in renewals if renewal is not None]
        if not changed:
            return None
        members = (place for place, parts in enumerate(self._groups) if any(one in parts for one in changed))
        return Renewal(next(renewal.version for _, renewal in renewals if renewal is not None), tuple(members))

    def _seen_by(self, drafter: Drafter, context: DraftContext) -> DraftContext:
        """Select the hidden states that a drafter's spec names."""
        ours, theirs = self.spec.hidden_layers, drafter.spec.hidden_layers
        if ours == theirs or context.hidden is None:
            return context
        parts = context.hidden.chunk(len(ours), -1)
        hidden = torch.cat([parts[ours.index(layer)] for layer in theirs], -1) if theirs else None
        return replace(context, hidden=hidden)


class ChoosingDrafter(MergedDrafter):
    """`auto`: lets one member propose at a time. All see every event, so that each can draft at any step.

    Args:
        drafters: The members by name.
        together: Groups of drafters whose merged trees are a further member, named `a+b`.
    """

    def __init__(self, drafters: Mapping[str, Drafter], together: Sequence[tuple[str, ...]] = ()) -> None:
        super().__init__(*drafters.values())
        self.members = (*drafters, *map("+".join, together))
        self._of_members: list[tuple[Drafter, ...]] = [(one,) for one in self.drafters]
        self._of_members += [tuple(drafters[name] for name in names) for names in together]
        # Those that draft together bring at least what the first one does.
        self.known = tuple(group[0].known[0] for group in self._of_members)

    @property
    def _groups(self) -> Sequence[tuple[Drafter, ...]]:
        return self._of_members

    @property
    def withheld(self) -> tuple[int, ...]:
        return tuple(place for place, member in enumerate(self._groups) if not all(one.drafts for one in member))

    def select(self, member: int) -> None:
        self._chosen = member

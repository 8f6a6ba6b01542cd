"""`auto`: several drafters, of which one drafts at a time. A budget chooses it by what it brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drafter.drafters.contract import Ask, DraftContext, Drafter
from drafter.drafters.merged import MergedDrafter
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import merge


class ChoosingDrafter(MergedDrafter):
    """Lets one of its members propose. All of them hear what happens to the sequences, so that each can at any step.

    A member that reads hidden states reads what has come since it drafted last.

    Args:
        members: The drafters by name.
    """

    def __init__(self, members: Mapping[str, Drafter]) -> None:
        super().__init__(*members.values())
        self.members = tuple(members)
        self._chosen = 0

    def select(self, member: int) -> None:
        """Choose who drafts."""
        self._chosen = member

    def prepare(self, context: DraftContext) -> None:
        """Prepare the chosen one."""
        drafter = self.drafters[self._chosen]
        drafter.prepare(self._seen_by(drafter, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]` of the chosen one."""
        drafter = self.drafters[self._chosen]
        most = drafter.spec.max_nodes
        tree = drafter.propose(self._seen_by(drafter, context), replace(ask, nodes=min(ask.nodes, most), member=0))
        return tree if tree.size > ask.nodes else merge([tree], self.spec.max_depth, ask.nodes + 1)

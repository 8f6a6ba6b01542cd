"""`a+b`: two drafters' trees merged as tries, each node at the larger of its two prices."""

from __future__ import annotations

from drafter.drafters.contract import DraftContext, Drafter
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import merge


class EnsembleDrafter(Drafter):
    """Both drafters propose; the best nodes of either make the tree."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.members = (first, second)
        self.tree_size = max(first.tree_size, second.tree_size)
        self.depth = max(first.depth, second.depth)
        self.reads_hidden = first.reads_hidden or second.reads_hidden

    def propose(self, context: DraftContext, size: int) -> TokenTree:
        """Trees `[B, size]`."""
        first, second = (member.propose(context, min(size, member.tree_size)) for member in self.members)
        return merge(first, second, self.depth, size)

    def catch_up(self, context: DraftContext) -> None:
        """Tell both."""
        for member in self.members:
            member.catch_up(context)

    def allocate(self, slots: int, length: int) -> None:
        """Make room in both."""
        for member in self.members:
            member.allocate(slots, length)

    def admit(self, slot: int) -> None:
        """Tell both."""
        for member in self.members:
            member.admit(slot)

    def move(self, source: int, target: int) -> None:
        """Move in both."""
        for member in self.members:
            member.move(source, target)

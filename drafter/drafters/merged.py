"""`a+b`: the trees of several drafters merged as tries, each node at the largest of its probabilities."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import merge


class MergedDrafter(Drafter):
    """Lets all members propose; the best nodes of any of them make the tree."""

    def __init__(self, *members: Drafter) -> None:
        self.members = members
        specs = [member.spec for member in members]
        self.spec = DraftSpec(
            max_nodes=max(spec.max_nodes for spec in specs),
            max_depth=max(spec.max_depth for spec in specs),
            hidden_layers=tuple(dict.fromkeys(layer for spec in specs for layer in spec.hidden_layers)),
            shared_layers=max(spec.shared_layers for spec in specs),
            scratch=max(spec.scratch for spec in specs),
            graph_safe=all(spec.graph_safe for spec in specs),
            lossless_only=any(spec.lossless_only for spec in specs),
        )

    def open(self, loan: Loan) -> None:
        """Open all."""
        for member in self.members:
            member.open(loan)

    def enter(self, slot: int, text: Ids) -> None:
        """Tell all."""
        for member in self.members:
            member.enter(slot, text)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy in all."""
        for member in self.members:
            member.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move in all."""
        for member in self.members:
            member.move(source, target)

    def clear(self, slot: int) -> None:
        """Clear all."""
        for member in self.members:
            member.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Prepare all."""
        for member in self.members:
            member.prepare(self._seen_by(member, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`."""
        trees = [
            member.propose(self._seen_by(member, context), replace(ask, nodes=min(ask.nodes, member.spec.max_nodes)))
            for member in self.members
        ]
        return merge(trees, self.spec.max_depth, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        """Tell all."""
        for member in self.members:
            member.observe(committed)

    def _seen_by(self, member: Drafter, context: DraftContext) -> DraftContext:
        """The context with the hidden states that a member's spec names."""
        ours, theirs = self.spec.hidden_layers, member.spec.hidden_layers
        if ours == theirs or context.hidden is None:
            return context
        parts = context.hidden.chunk(len(ours), -1)
        hidden = torch.cat([parts[ours.index(layer)] for layer in theirs], -1) if theirs else None
        return replace(context, hidden=hidden)

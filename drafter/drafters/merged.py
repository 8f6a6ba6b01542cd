"""Drafters made of several: `a+b` merges their trees, `auto` lets one of them propose at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from drafter.drafters.contract import (
    Ask,
    Committed,
    DraftContext,
    Drafter,
    DraftSpec,
    Loan,
    MeasuredWorth,
    SlotState,
)
from drafter.tree.token_tree import TokenTree, merge


class MergedDrafter(Drafter):
    """`a+b`: merges the trees of all drafters by the largest probability, and keeps the best nodes.

    Args:
        hidden_layers: Those of its contexts, if not those that the drafters read.
    """

    def __init__(self, *drafters: Drafter, hidden_layers: tuple[int, ...] | None = None) -> None:
        self.drafters = drafters
        specs = [drafter.spec for drafter in drafters]
        read = tuple(dict.fromkeys(layer for spec in specs for layer in spec.hidden_layers))
        self.spec = DraftSpec(
            max_nodes=max(spec.max_nodes for spec in specs),
            max_depth=max(spec.max_depth for spec in specs),
            hidden_layers=read if hidden_layers is None else hidden_layers,
            graph_safe=all(spec.graph_safe for spec in specs),
            bounded=any(spec.bounded for spec in specs),
            bytes_per_token=sum(spec.bytes_per_token for spec in specs),
            run=max(spec.run for spec in specs),
        )

    @property
    def slots(self) -> Sequence[SlotState]:  # type: ignore[override]
        return [state for drafter in self.drafters for state in drafter.slots]

    @property
    def worth(self) -> MeasuredWorth | None:  # type: ignore[override]
        """Together they bring at least what the first one does."""
        return self.drafters[0].worth

    @property
    def drafts(self) -> bool:  # type: ignore[override]
        return all(drafter.drafts for drafter in self.drafters)

    @property
    def version(self) -> int | None:
        """Version of the first one whose weights change."""
        return next((one.version for one in self.drafters if one.version is not None), None)

    def open(self, loan: Loan) -> None:
        for drafter in self.drafters:
            drafter.open(loan)

    def observe(self, committed: Committed) -> None:
        for drafter in self.drafters:
            drafter.observe(committed)

    def prepare(self, context: DraftContext) -> None:
        for drafter in self.drafters:
            drafter.prepare(self._seen_by(drafter, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        trees = [
            drafter.propose(self._seen_by(drafter, context), replace(ask, nodes=min(ask.nodes, drafter.spec.max_nodes)))
            for drafter in self.drafters
        ]
        if len(trees) > 1:
            return merge(trees, self.spec.max_depth, ask.nodes + 1)
        return trees[0] if trees[0].size > ask.nodes else trees[0].padded(ask.nodes + 1)

    def _seen_by(self, drafter: Drafter, context: DraftContext) -> DraftContext:
        """Select the hidden states that a drafter's spec names."""
        ours, theirs = self.spec.hidden_layers, drafter.spec.hidden_layers
        if ours == theirs or context.hidden is None:
            return context
        parts = context.hidden.chunk(len(ours), -1)
        hidden = torch.cat([parts[ours.index(layer)] for layer in theirs], -1) if theirs else None
        return replace(context, hidden=hidden)


class ChoosingDrafter(MergedDrafter):
    """`auto`: one of its `members` proposes at a time, the first where no budget chooses.

    All drafters see every event, so that each can draft at any step.

    Args:
        drafters: By name.
        together: Groups of drafters whose merged trees are a further member, named `a+b`.
    """

    def __init__(self, drafters: Mapping[str, Drafter], together: Sequence[tuple[str, ...]] = ()) -> None:
        super().__init__(*drafters.values())
        self.members = {
            "+".join(names): MergedDrafter(*map(drafters.__getitem__, names), hidden_layers=self.spec.hidden_layers)
            for names in (*((name,) for name in drafters), *together)
        }
        self._first = next(iter(self.members.values()))

    def prepare(self, context: DraftContext) -> None:
        self._first.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return self._first.propose(context, ask)

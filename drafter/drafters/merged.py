"""Drafters made of several: `a+b` merges their trees as tries by the largest probability; `auto` chooses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftMemory, DraftSpec, Ids, Loan, Renewal
from drafter.tree.token_tree import TokenTree, merge


class MergedDrafter(Drafter):
    """Merges the trees of all members and keeps the best nodes."""

    def __init__(self, *members: Drafter) -> None:
        self.drafters = members
        specs = [member.spec for member in members]
        self.spec = DraftSpec(
            max_nodes=max(spec.max_nodes for spec in specs),
            max_depth=max(spec.max_depth for spec in specs),
            hidden_layers=tuple(dict.fromkeys(layer for spec in specs for layer in spec.hidden_layers)),
            shared_layers=max(spec.shared_layers for spec in specs),
            scratch=max(spec.scratch for spec in specs),
            graph_safe=all(spec.graph_safe for spec in specs),
            lossless_only=any(spec.lossless_only for spec in specs),
            bounded=any(spec.bounded for spec in specs),
            bytes_per_token=sum(spec.bytes_per_token for spec in specs),
        )

    def open(self, loan: Loan) -> None:
        for member in self.drafters:
            member.open(loan)

    def enter(self, slot: int, text: Ids) -> None:
        for member in self.drafters:
            member.enter(slot, text)

    def copy(self, source: int, target: int, length: int) -> None:
        for member in self.drafters:
            member.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        for member in self.drafters:
            member.move(source, target)

    def clear(self, slot: int) -> None:
        for member in self.drafters:
            member.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        for member in self.drafters:
            member.prepare(self._seen_by(member, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]`."""
        trees = [
            member.propose(self._seen_by(member, context), replace(ask, nodes=min(ask.nodes, member.spec.max_nodes)))
            for member in self.drafters
        ]
        return merge(trees, self.spec.max_depth, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        for member in self.drafters:
            member.observe(committed)

    @property
    def memory(self) -> DraftMemory:
        """Sum of the members' memories, with the largest room."""
        memories = [member.memory for member in self.drafters]
        return DraftMemory(
            tokens=sum(one.tokens for one in memories),
            nbytes=sum(one.nbytes for one in memories),
            room=max(one.room for one in memories),
        )

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        for member in self.drafters:
            member.remember(texts)

    @property
    def version(self) -> int | None:
        """Version of the member whose weights change."""
        return next((one.version for one in self.drafters if one.version is not None), None)

    def offer(self, number: int, weights: Mapping[str, Tensor]) -> None:
        for member in self.drafters:
            member.offer(number, weights)

    def renew(self) -> Renewal | None:
        found = [renewal for member in self.drafters if (renewal := member.renew()) is not None]
        return Renewal(found[0].version) if found else None

    def _seen_by(self, member: Drafter, context: DraftContext) -> DraftContext:
        """Select the hidden states that a member's spec names."""
        ours, theirs = self.spec.hidden_layers, member.spec.hidden_layers
        if ours == theirs or context.hidden is None:
            return context
        parts = context.hidden.chunk(len(ours), -1)
        hidden = torch.cat([parts[ours.index(layer)] for layer in theirs], -1) if theirs else None
        return replace(context, hidden=hidden)


class ChoosingDrafter(MergedDrafter):
    """Lets one member propose at a time. All members see every event, so that each can draft at any step.

    A member that reads hidden states catches up from where it last drafted.

    Args:
        drafters: The members by name.
        together: Groups of drafters whose merged trees are a further member, named `a+b`.
    """

    def __init__(self, drafters: Mapping[str, Drafter], together: Sequence[tuple[str, ...]] = ()) -> None:
        super().__init__(*drafters.values())
        self.members = (*drafters, *map("+".join, together))
        self._parts = [(one,) for one in self.drafters] + [tuple(drafters[name] for name in one) for one in together]
        self._chosen = 0

    @property
    def withheld(self) -> tuple[int, ...]:
        """Members of which a drafter has nothing to draft with."""
        return tuple(place for place, parts in enumerate(self._parts) if not all(one.drafts for one in parts))

    @property
    def version(self) -> int | None:
        """Version of the chosen member."""
        return next((one.version for one in self._parts[self._chosen] if one.version is not None), None)

    def renew(self) -> Renewal | None:
        renewed = {place: found for place, one in enumerate(self.drafters) if (found := one.renew()) is not None}
        if not renewed:
            return None
        changed = [self.drafters[place] for place in renewed]
        members = (place for place, parts in enumerate(self._parts) if any(one in parts for one in changed))
        return Renewal(next(iter(renewed.values())).version, tuple(members))

    def select(self, member: int) -> None:
        self._chosen = member

    def prepare(self, context: DraftContext) -> None:
        for drafter in self._parts[self._chosen]:
            drafter.prepare(self._seen_by(drafter, context))

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]` of the chosen member."""
        trees = [
            drafter.propose(
                self._seen_by(drafter, context), replace(ask, nodes=min(ask.nodes, drafter.spec.max_nodes), member=0)
            )
            for drafter in self._parts[self._chosen]
        ]
        whole = len(trees) == 1 and trees[0].size > ask.nodes
        return trees[0] if whole else merge(trees, self.spec.max_depth, ask.nodes + 1)

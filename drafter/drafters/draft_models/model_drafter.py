"""`model:A`: a tree out of a smaller language model with the base's tokeniser (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.drafters.draft_models.text_reader import RunNodes, TextReader
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import from_nodes

_DEPTH = 8
"""Draft tokens of a path at most, each of which costs a forward of the draft model."""
_WIDTH = 16
"""Nodes of one depth that are run at most. With more draft nodes than this the best tree may be missed."""


class ModelDrafter(Drafter):
    """Lets a draft model propose its most probable continuations, a depth of the tree in each forward.

    Best-first expansion runs only nodes that are among the best `nodes` found so far. A path's probability falls along
    it, so no other node can have a child in the tree of the best nodes.

    Args:
        model: The draft model, with the base's tokeniser, on any device.
        base: The base that it drafts for.
        nodes: Draft nodes of the largest tree. With an `expansion` its own number counts.
        expansion: A fixed shape instead: how many children each node of each depth has, from the root on; SpecInfer's
            is `(1, 1, 3, 1, 1, 1, 1, 1)`.

    Raises:
        ValueError: The `expansion` is empty, or has a number below 1.
    """

    def __init__(self, model: BaseModel, base: BaseModel, nodes: int, expansion: Sequence[int] | None = None) -> None:
        self._expansion = None if expansion is None else tuple(expansion)
        if self._expansion is not None:
            if min(self._expansion, default=0) < 1:
                raise ValueError(f"expansion must be at least one number, none below 1, not {self._expansion}")
            nodes = sum(accumulate(self._expansion, int.__mul__))
        depth = min(nodes, _DEPTH) if self._expansion is None else len(self._expansion)
        self._reader = TextReader(model, base, depth + 1)
        beside = model.device == base.device
        kept = sum(model.kv_bytes_per_token) if beside else 0
        self.spec = DraftSpec(nodes, depth, graph_safe=beside, bytes_per_token=kept)

    def open(self, loan: Loan) -> None:
        """Allocate the draft model's KV cache."""
        self._times = loan.times
        width, in_all = 1, 0
        for depth in range(1, self.spec.max_depth):
            width = self._level(depth, width, self.spec.max_nodes).run
            in_all += width
        self._reader.open(loan.slots, loan.length, in_all)

    def enter(self, slot: int, text: Ids) -> None:
        """Forget the sequence before: nothing of the new one has been read."""
        self._reader.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what was read of the common beginning."""
        self._reader.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move what was read of the sequence."""
        self._reader.move(source, target)

    def clear(self, slot: int) -> None:
        """Set the slot's keys and values to zero."""
        self._reader.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step brings."""
        self._reader.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Read the new tokens, grow the trees depth by depth, and return the best nodes `[B, 1 + ask.nodes]`."""
        log_probs = self._reader.read(context)
        rows, device = len(log_probs), log_probs.device
        above = torch.zeros(rows, 1, device=device)  # log-probability of the nodes whose children come next
        candidates = run_nodes = torch.full((rows, 1), -1, device=device)  # where these are among all of either
        run = RunNodes.none(rows, device)
        found: list[Children] = []
        depths = min(self.spec.max_depth, ask.nodes) if self._expansion is None else self.spec.max_depth
        for depth in range(1, depths + 1):
            level = self._level(depth, above.shape[1], ask.nodes)
            children = best_children(log_probs, above, level.children, level.keep)
            before = sum(one.tokens.shape[1] for one in found)
            found.append(replace(children, parents=candidates.gather(1, children.parents)))
            if depth == depths:
                break
            alive = self._worth_running(found, ask)[:, : level.run]
            width = alive.shape[1] if self._reader.fixed else int(alive.sum(1).max())
            if not width:
                break
            alive, parents = alive[:, :width], run_nodes.gather(1, children.parents[:, :width])
            above = torch.where(alive, children.log_probs[:, :width], -torch.inf)
            candidates = (torch.arange(width, device=device) + before).expand(rows, -1)
            run_nodes = candidates - before + run.tokens.shape[1]
            run = run.then(children.tokens[:, :width], depth, parents)
            log_probs = self._reader.extend(context, run, alive)
        self._times.mark("draft")
        parts = [torch.cat([getattr(one, name) for one in found], 1) for name in ("tokens", "parents", "log_probs")]
        tokens, parents, log_probs = (part.to(context.tokens.device) for part in parts)
        below = [torch.full_like(one.tokens, depth) for depth, one in enumerate(found, start=1)]
        depth_of = torch.cat(below, 1).to(tokens.device)
        return from_nodes(context.pending, tokens, parents, depth_of, log_probs, ask.nodes + 1)

    def _level(self, depth: int, width: int, nodes: int) -> Level:
        """Say how the nodes of a depth come from `width` nodes above them, in a tree of so many draft nodes."""
        if self._expansion is not None:
            children = self._expansion[depth - 1]
            return Level(children, width * children, width * children)
        return Level(nodes, nodes, min(nodes, _WIDTH))

    def _worth_running(self, found: Sequence[Children], ask: Ask) -> Tensor:
        """Return which nodes of the last depth may have children in the tree, `[B, K]`; they come first."""
        log_probs = found[-1].log_probs
        alive = log_probs > -torch.inf
        if self._expansion is not None or self._reader.fixed:
            return alive
        in_all = torch.cat([one.log_probs for one in found], 1)
        last = in_all.topk(min(ask.nodes, in_all.shape[1])).values[:, -1:]
        return alive & (log_probs >= last) & (log_probs.exp() >= ask.least_probability)


@dataclass(frozen=True)
class Level:
    """How a depth of a tree comes from the one above it.

    Args:
        children: Of each node above.
        keep: Of all these, the most probable ones.
        run: Of these, the most probable ones that may get children themselves.
    """

    children: int
    keep: int
    run: int


@dataclass(frozen=True)
class Children:
    """Nodes of one depth, by falling probability.

    Args:
        tokens: `[B, K]` int64.
        parents: `[B, K]` int64 index of each one's parent.
        log_probs: `[B, K]` float32 log prefix probability; -inf for a node that does not exist.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor


def best_children(log_probs: Tensor, above: Tensor, each: int, keep: int) -> Children:
    """Return the `keep` most probable of the `each` most probable children of every node.

    Args:
        log_probs: `[B, W, V]` of the token after each node.
        above: `[B, W]` log prefix probability of the nodes.
        each: At most V of them are taken.
        keep: At most all of them are taken.
    """
    best, tokens = log_probs.topk(min(each, log_probs.shape[2]))
    of_each = best.shape[2]
    paths, order = (above[:, :, None] + best).flatten(1).topk(min(keep, best[0].numel()))
    return Children(tokens.flatten(1).gather(1, order), order // of_each, paths)

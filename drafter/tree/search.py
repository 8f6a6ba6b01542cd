"""Best draft trees of autoregressive drafters, and of independent distributions per depth.

An autoregressive drafter must run over a node to know its children, and keeps the node's keys and values. So nodes get
*places* in the order in which they are run; the tree's order, by probability, is found at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.tree.token_tree import TokenTree, from_nodes, from_paths, root_only


@dataclass(frozen=True)
class Frontier:
    """Nodes that have places, the root first. The last F = P - first nodes have not been run."""

    tokens: Tensor  # `[B, P]`; the root's where a row has fewer nodes
    depths: Tensor  # `[B, P]` below the root
    ancestors: Tensor  # `[B, P, P]` bool, as `TokenTree.ancestors`
    first: int
    real: Tensor  # `[B, F]` bool: existing ones among the last F


Conditionals = Callable[[Frontier], tuple[Tensor, Tensor]]
"""Runs a frontier's F last nodes. Returns the log-probabilities `[B, F, K]` of the K most probable next tokens,
descending, and these tokens `[B, F, K]`; values for nodes that are not real are undefined.
"""


@torch.no_grad()
def best_first_trie(
    conditionals: Conditionals, pending: Tensor, depth: int, size: int, beam: int, least: float = 0.0
) -> TokenTree:
    """Grow trees of the most probable prefixes, by one forward per level over the `beam` most probable nodes.

    With a beam as wide as the tree the search is exact. On a GPU the work does not depend on values, so it can be
    recorded as a graph without host synchronisation. On a CPU, where each node costs time, only nodes among the best of
    all so far are run, as no other can have a child in a tree of that size.

    Args:
        conditionals: The model. It is called at most `depth` times.
        beam: Most nodes of a depth that are run; `most_places(depth, beam)` is the largest P of a frontier.
        least: On a CPU, prefixes of no higher probability are not extended.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    if size < 2:
        return root_only(pending)
    roots = pending[:, None]
    everywhere = torch.ones_like(roots, dtype=torch.bool)
    frontier = Frontier(roots, torch.zeros_like(roots), everywhere[:, :, None], 0, everywhere)
    # Of the frontier's F last nodes: log prefix probability, and index among all candidates, -1 of the root.
    reached, names = torch.zeros_like(roots, dtype=torch.float32), torch.full_like(roots, -1)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for level in range(1, min(depth, size - 1) + 1):
        log_probs, tokens = conditionals(frontier)
        children = log_probs.shape[2]
        # Non-finite values have no children; rounding must not lift a certain token above its parent.
        scores = reached[:, :, None] + _finite(log_probs.float()).clamp_max(0.0)
        scores = scores.masked_fill(~frontier.real[:, :, None], -torch.inf).flatten(1)
        best, index = scores.topk(min(size - 1, scores.shape[1]))
        parent = index // children
        levels.append((tokens.flatten(1).gather(1, index), names.gather(1, parent), best))
        width = min(beam, size - 1 - level, best.shape[1])
        if level == depth or width < 1:
            break
        chosen = best[:, :width] > -torch.inf
        if not devices.is_asynchronous(pending.device):
            chosen &= _promising(levels, size, least)[:, :width]
            width = int(chosen.sum(1).max())
            if not width:
                break
        before = sum(one.shape[1] for one, _, _ in levels[:-1])
        names = (before + torch.arange(width, device=pending.device)).expand(len(pending), -1)
        reached = best[:, :width]
        frontier = _extended(frontier, levels[-1][0][:, :width], parent[:, :width], chosen[:, :width], level)
    tokens, parents, probs = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    depths = [torch.full_like(one[0], at) for at, (one, _, _) in enumerate(levels, start=1)]
    return from_nodes(pending, tokens, parents, torch.cat(depths), probs, size)


def _finite(log_probs: Tensor) -> Tensor:
    return log_probs.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def most_places(depth: int, beam: int) -> int:
    """Return the most nodes that are run: the root, and a beam of each depth but the last."""
    return 1 + (depth - 1) * beam


def _promising(levels: list[tuple[Tensor, Tensor, Tensor]], size: int, least: float) -> Tensor:
    """Return which candidates of the last level may have children in the tree, `[B, C]`; they come first."""
    last = levels[-1][2]
    wanted = last > (math.log(least) if least > 0 else -math.inf)
    found = torch.cat([one for _, _, one in levels], 1)
    if found.shape[1] >= size - 1:
        wanted &= last > found.topk(size - 1).values[:, -1:]
    return wanted


def _extended(frontier: Frontier, tokens: Tensor, parents: Tensor, real: Tensor, level: int) -> Frontier:
    """Return a frontier with new last nodes `[B, W]`; `parents` are counted from the present frontier's first."""
    places, width = frontier.tokens.shape[1], tokens.shape[1]
    above = frontier.ancestors.gather(1, (frontier.first + parents)[:, :, None].expand(-1, -1, places))
    themselves = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    ancestors = torch.cat([F.pad(frontier.ancestors, (0, width)), torch.cat([above, themselves], 2)], 1)
    return Frontier(
        torch.cat([frontier.tokens, torch.where(real, tokens, frontier.tokens[:, :1])], 1),
        torch.cat([frontier.depths, torch.full_like(tokens, level)], 1),
        ancestors,
        places,
        real,
    )


def best_product_trie(log_probs: Tensor, pending: Tensor, size: int) -> TokenTree:
    """Find the exact `size`-node trie of the most probable prefixes under independent distributions per depth.

    `log_probs` `[B, U, V]` are normalised.
    """
    beam = size - 1
    if beam < 1:
        return root_only(pending)
    batch, depth, vocabulary = log_probs.shape
    best, names = log_probs.float().topk(min(beam, vocabulary), dim=2)
    width = best.shape[2]
    parent_probs = best.new_zeros(batch, 1)
    tokens, parents, depths, levels, before = [], [], [], [], -1
    for level in range(min(depth, beam)):
        scores = (parent_probs[:, :, None] + best[:, level, None]).flatten(1)
        kept, index = scores.topk(min(beam - level, scores.shape[1]))
        tokens.append(names[:, level].gather(1, index % width))
        parents.append(index // width + before)
        depths.append(torch.full_like(index, level + 1))
        levels.append(kept)
        before = 0 if level == 0 else before + parent_probs.shape[1]
        parent_probs = kept
    return from_nodes(
        pending, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(levels, 1), size
    )


def likeliest_chain(log_probs: Tensor, pending: Tensor, size: int) -> TokenTree:
    """Return the chain of each depth's most probable token under `log_probs` `[B, U, V]`, padded beyond U."""
    best, names = log_probs[:, : size - 1].float().max(2)
    return from_paths(pending, names[:, None], best.cumsum(1)[:, None], size)

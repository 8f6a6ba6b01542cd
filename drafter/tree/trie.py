"""Tries of candidate continuations: how drafters and searches make a `TokenTree`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.tree.token_tree import PAD_TOKEN, TokenTree, root_only


def from_nodes(
    pending: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, log_probs: Tensor, size: int
) -> TokenTree:
    """Return the tree of the most probable of many candidate nodes.

    Args:
        pending: `[B]` tokens of the roots.
        tokens: `[B, M]` candidate tokens, **in an order that puts parents before children**.
        parents: `[B, M]` index of each candidate's parent among the candidates, -1 for the root.
        depths: `[B, M]` or `[M]`, 1 below the root.
        log_probs: `[B, M]` log prefix probabilities, no child above its parent; -inf for a candidate that does not
            exist.
        size: Nodes of each tree, root included. A row with fewer candidates is padded.
    """
    batch, candidates = tokens.shape
    # A stable sort keeps parents before children of equal probability.
    falling, order = torch.sort(log_probs, dim=1, descending=True, stable=True)
    keep = min(size - 1, candidates)
    falling, chosen = falling[:, :keep], order[:, :keep]
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(candidates, device=order.device).expand(batch, -1))
    exists = falling > -torch.inf
    parent = parents.gather(1, chosen)
    # Node 0 is the root, so a candidate of rank r becomes node r + 1.
    parent = torch.where(exists & (parent >= 0), rank.gather(1, parent.clamp_min(0)) + 1, 0)
    body = TokenTree(
        torch.where(exists, tokens.gather(1, chosen), PAD_TOKEN),
        parent,
        torch.where(exists, depths.expand(batch, -1).gather(1, chosen), 1),
        falling.float(),
    )
    root = root_only(pending)
    tree = TokenTree(*(torch.cat(parts, 1) for parts in zip(vars(root).values(), vars(body).values(), strict=True)))
    missing = (0, size - 1 - keep)
    if not missing[1]:
        return tree
    return TokenTree(
        F.pad(tree.tokens, missing, value=PAD_TOKEN),
        F.pad(tree.parents, missing, value=0),
        F.pad(tree.depths, missing, value=1),
        F.pad(tree.log_probs, missing, value=-torch.inf),
    )


def from_paths(pending: Tensor, paths: Tensor, log_probs: Tensor, size: int) -> TokenTree:
    """Merge paths into tries. Equal prefixes become one node, with the largest of their probabilities.

    Args:
        pending: `[B]` tokens of the roots.
        paths: `[B, P, U]` continuations, `PAD_TOKEN` past a path's end.
        log_probs: `[B, P, U]` log probability of each prefix, falling along a path.
        size: Nodes of each tree, root included.
    """
    batch, count, depth = paths.shape
    same = torch.ones(batch, count, count, dtype=torch.bool, device=paths.device)
    index = torch.arange(count, device=paths.device)
    tokens, parents, probs = [], [], []
    before = torch.full((batch, count), -1, dtype=torch.long, device=paths.device)
    for level in range(depth):
        token, prob = paths[:, :, level], log_probs[:, :, level].float()
        exists = token >= 0
        same = same & (token[:, :, None] == token[:, None, :]) & exists[:, :, None]
        # Of several paths with the same prefix only the first makes a node. `argmax` finds the first true.
        first = same.int().argmax(dim=2)
        best = prob[:, None, :].masked_fill(~same, -torch.inf).amax(dim=2)
        tokens.append(token)
        parents.append(before)
        probs.append(best.masked_fill(~exists | (first != index), -torch.inf))
        before = torch.where(exists, first + level * count, -1)
    depths = torch.arange(1, depth + 1, device=paths.device).repeat_interleave(count)
    return from_nodes(
        pending, torch.cat(tokens, 1), torch.cat(parents, 1), depths.expand(batch, -1), torch.cat(probs, 1), size
    )


def merge(trees: Sequence[TokenTree], depth: int, size: int) -> TokenTree:
    """Merge trees of the same rows as tries. A node of several trees gets the largest of its probabilities.

    Args:
        trees: At least one, each `[B, N]` with an N of its own.
        depth: Depth of the deepest node of any tree.
        size: Nodes of each resulting tree, root included.
    """
    paths = torch.cat([tree.paths(depth) for tree in trees], 1)
    log_probs = torch.cat([tree.path_log_probs(depth) for tree in trees], 1)
    return from_paths(trees[0].tokens[:, 0], paths, log_probs, size)

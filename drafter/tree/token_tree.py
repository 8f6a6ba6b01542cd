"""The draft tree that a drafter proposes and the target model verifies.

A `TokenTree` lists its nodes by falling prefix probability, parents before children, so any leading slice is a valid
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAD_TOKEN = -1
"""Token of a padding node. No target model generates it, so padding is never accepted."""
_PADDING = (PAD_TOKEN, 0, 1, -torch.inf)
"""Token, parent, depth and log-probability of a padding node."""


@dataclass(frozen=True)
class TokenTree:
    """A batch of draft trees. Node 0 is the root: the row's pending token, of probability 1.

    Args:
        tokens: `[B, N]` int64; `PAD_TOKEN` in padding nodes, which come last.
        parents: `[B, N]` int64 index of the parent node; 0 for the root and for padding.
        depths: `[B, N]` int64 distance from the root.
        log_probs: `[B, N]` float32 log prefix probability as the drafter estimates it, falling; -inf in padding.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor

    @property
    def size(self) -> int:
        """N, nodes of each row, root and padding included."""
        return self.tokens.shape[1]

    def leading(self, nodes: int) -> TokenTree:
        """Return the trees of the first `nodes` nodes, root included: the best trees of that size."""
        return TokenTree(*(part[:, :nodes] for part in vars(self).values()))

    def trimmed(self, sizes: Tensor) -> TokenTree:
        """Return the trees of each row's first `sizes` `[B]` nodes, root included, padded to the largest."""
        tree = self.leading(int(sizes.max()))
        kept = torch.arange(tree.size, device=sizes.device) < sizes[:, None]
        parts = zip(vars(tree).values(), _PADDING, strict=True)
        return TokenTree(*(torch.where(kept, part, padding) for part, padding in parts))

    def ancestors(self, depth: int | None = None) -> Tensor:
        """Return whether node `j` is node `i` or one of its ancestors, in entry `[b, i, j]` of `[B, N, N]` bool.

        The deepest node's `depth`, if known, saves steps. For the tree 0 → 1 → 3, 0 → 2 (parents `[0, 0, 0, 1]`)::

            1 . . .
            1 1 . .
            1 . 1 .
            1 1 . 1
        """
        # Each step doubles how far back ancestors are known: log2(D + 1) steps for depth D.
        batch, nodes = self.parents.shape
        identity = torch.eye(nodes, dtype=torch.bool, device=self.parents.device)
        reach, hop, span = identity.expand(batch, nodes, nodes), self.parents, 1
        while span < min(nodes, nodes if depth is None else depth + 1):
            reach = reach | reach.gather(1, hop[:, :, None].expand(-1, -1, nodes))
            hop = hop.gather(1, hop)
            span *= 2
        return reach

    def first_children(self) -> Tensor:
        """Return each node's first child, the most probable one, `[B, N]` node ids; N for a leaf.

        For the tree 0 → 1 → 3, 0 → 2 that is `[1, 3, 4, 4]`.
        """
        ids = torch.arange(self.size, device=self.parents.device)
        drafted = torch.where((ids > 0) & (self.tokens >= 0), ids, self.size)
        return torch.full_like(self.parents, self.size).scatter_reduce(1, self.parents, drafted, "amin")

    def paths(self, depth: int) -> Tensor:
        """Return the tokens from below the root to each node, `[B, N, depth]`; `PAD_TOKEN` past a path's end."""
        return self._along_paths(self.tokens, PAD_TOKEN, depth)

    def path_log_probs(self, depth: int) -> Tensor:
        """Return the log-probabilities of the same nodes; -inf past a path's end."""
        return self._along_paths(self.log_probs, -torch.inf, depth)

    def _along_paths(self, values: Tensor, fill: float, depth: int) -> Tensor:
        ancestors = self.ancestors()
        place = (self.depths - 1)[:, None, :].expand_as(ancestors)
        wanted = ancestors & (place >= 0) & (place < depth)
        source = torch.where(wanted, values[:, None, :], fill)
        # Other entries go to a last column that is cut off.
        filled = values.new_full((*values.shape, depth + 1), fill)
        return filled.scatter(2, torch.where(wanted, place, depth), source)[..., :depth]


def root_only(pending: Tensor) -> TokenTree:
    """Return trees without draft tokens, of pending tokens `[B]`. Verifying them is plain decoding."""
    tokens = pending[:, None]
    zeros = torch.zeros_like(tokens)
    return TokenTree(tokens, zeros, zeros, torch.zeros_like(tokens, dtype=torch.float32))


def bare_trees(pending: Tensor, size: int) -> TokenTree:
    """Return trees `[B, size]` all of whose nodes are roots, of pending tokens `[B]`; a forward treats them as any."""
    return TokenTree(*(part.expand(len(pending), size) for part in vars(root_only(pending)).values()))


def from_nodes(
    pending: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, log_probs: Tensor, size: int
) -> TokenTree:
    """Return the tree of the most probable candidate nodes.

    Args:
        tokens: `[B, M]` candidate tokens, **in an order that puts parents before children**.
        parents: `[B, M]` index of each candidate's parent among the candidates, -1 for the root.
        depths: `[B, M]` or `[M]`, 1 below the root.
        log_probs: `[B, M]` log prefix probabilities, no child above its parent; -inf for a missing candidate.
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
    if not (missing := size - 1 - keep):
        return tree
    parts = zip(vars(tree).values(), _PADDING, strict=True)
    return TokenTree(*(F.pad(part, (0, missing), value=padding) for part, padding in parts))


def from_paths(pending: Tensor, paths: Tensor, log_probs: Tensor, size: int) -> TokenTree:
    """Merge paths into tries. Equal prefixes become one node, with the largest of their probabilities.

    `paths` `[B, P, U]` have `PAD_TOKEN` past their ends; `log_probs` `[B, P, U]` of their prefixes fall along a path.
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
    """Merge trees `[B, N]` of the same rows, each with its own N, none deeper than `depth`, as `from_paths` does."""
    paths = torch.cat([tree.paths(depth) for tree in trees], 1)
    log_probs = torch.cat([tree.path_log_probs(depth) for tree in trees], 1)
    return from_paths(trees[0].tokens[:, 0], paths, log_probs, size)

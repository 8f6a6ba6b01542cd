"""Draft trees, and searches for the best ones. Nodes are listed by falling prefix probability, parents before
children, so any leading slice is a valid tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.tree.paths import RowDrafts

PAD_TOKEN = -1  # token of a padding node; no target model generates it, so padding is never accepted
PADDING = (PAD_TOKEN, 0, 1, -torch.inf)  # token, parent, depth and log-probability of a padding node


@dataclass(frozen=True)
class TokenTree:
    """A batch of draft trees. Node 0 is the root: the row's pending token, of probability 1."""

    tokens: Tensor  # `[B, N]` int64; `PAD_TOKEN` in padding nodes, which come last
    parents: Tensor  # `[B, N]` int64 index of the parent node; 0 for the root and for padding
    depths: Tensor  # `[B, N]` int64 distance from the root
    log_probs: Tensor  # `[B, N]` float32 log prefix probability by the drafter, falling; -inf in padding

    @property
    def size(self) -> int:
        """N, nodes of each row, root and padding included."""
        return self.tokens.shape[1]

    def leading(self, nodes: int) -> TokenTree:
        """Return the trees of the first `nodes` nodes, root included: the best trees of that size."""
        return TokenTree(*(part[:, :nodes] for part in vars(self).values()))

    def first_rows(self, rows: int) -> TokenTree:
        """Return the trees of the first rows."""
        return TokenTree(*(part[:rows] for part in vars(self).values()))

    def padded(self, size: int) -> TokenTree:
        """Return the trees with padding up to `size` nodes, root included."""
        parts = zip(vars(self).values(), PADDING, strict=True)
        return TokenTree(*(F.pad(part, (0, size - self.size), value=padding) for part, padding in parts))

    def trimmed(self, sizes: Tensor) -> TokenTree:
        """Return the trees of each row's first `sizes` `[B]` nodes, root included, padded to the largest."""
        tree = self.leading(int(sizes.max()))
        if int(sizes.min()) == tree.size:
            return tree
        kept = torch.arange(tree.size, device=sizes.device) < sizes[:, None]
        parts = zip(vars(tree).values(), PADDING, strict=True)
        return TokenTree(*(torch.where(kept, part, padding) for part, padding in parts))

    def no_deeper(self, depths: Tensor) -> TokenTree:
        """Return the trees without nodes deeper than `depths` `[B]`; padding takes their places, at the end."""
        kept = (self.tokens >= 0) & (self.depths <= depths[:, None])
        order = kept.int().argsort(dim=1, descending=True, stable=True)
        kept, rank = kept.gather(1, order), order.argsort(1)
        moved = replace(self, parents=rank.gather(1, self.parents))  # a kept node's parent is kept
        parts = zip(vars(moved).values(), PADDING, strict=True)
        return TokenTree(*(torch.where(kept, part.gather(1, order), padding) for part, padding in parts))

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


def followed(following: Tensor, depth: int) -> Tensor:
    """Return nodes `[B, 1 + depth]` from the root on, each the `following` `[B, N]` of the one before; N past the end.

    Where nodes are followed by `[1, 3, 4, 4]`, that is `[0, 1, 3, 4]` for a depth of 3.
    """
    following = F.pad(following, (0, 1), value=following.shape[1])
    path = [torch.zeros_like(following[:, :1])]
    for _ in range(depth):
        path.append(following.gather(1, path[-1]))
    return torch.cat(path, 1)


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
    return tree if tree.size == size else tree.padded(size)


def from_rows(pending: Tensor, rows: Sequence[RowDrafts], size: int) -> TokenTree:
    """Return the tree of the most probable candidates of each row, which are on the host; see `from_nodes`."""
    width = max(1, *(len(row.tokens) for row in rows))
    parts = (*np.zeros((3, len(rows), width), np.int64), np.full((len(rows), width), -np.inf, np.float32))
    for place, row in enumerate(rows):
        for part, values in zip(parts, vars(row).values(), strict=True):
            part[place, : len(values)] = values
    tokens, parents, depths, log_probs = (devices.send(torch.from_numpy(part), pending.device) for part in parts)
    return from_nodes(pending, tokens, parents, depths, log_probs, size)


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


@dataclass(frozen=True)
class Frontier:
    """Nodes with *places*, in the order in which an autoregressive drafter runs over them, the root first.

    To know a node's children, it must run over the node, and keeps its keys and values at that place. The last
    F = P - first nodes have not been run. The tree's order, by probability, is found at the end.
    """

    tokens: Tensor  # `[B, P]`; the root's where a row has fewer nodes
    depths: Tensor  # `[B, P]` below the root
    parents: Tensor  # `[B, P]` places of the nodes' parents; 0 for the root
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
        beam: Most nodes of a depth that are run; `most_places(depth, size, beam)` is the largest P of a frontier.
        least: On a CPU, prefixes of no higher probability are not extended.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    if size < 2:
        return root_only(pending)
    roots = pending[:, None]
    everywhere = torch.ones_like(roots, dtype=torch.bool)
    zeros = torch.zeros_like(roots)
    frontier = Frontier(roots, zeros, zeros, everywhere[:, :, None], 0, everywhere)
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
            least_log = math.log(least) if least > 0 else -math.inf
            chosen &= promising([one for _, _, one in levels], size, least_log)[:, :width]
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


def most_places(depth: int, size: int, beam: int) -> int:
    """Return the most nodes that `best_first_trie` runs: the root, and of each depth but the last the best ones."""
    return 1 + sum(max(0, min(beam, size - 1 - level)) for level in range(1, depth))


def promising(levels: Sequence[Tensor], size: int, least: float) -> Tensor:
    """Return which candidates of the last level may have children in a tree of `size` nodes, `[B, C]`.

    Only nodes in the best tree of all candidates so far can have a child in a tree of that size.

    Args:
        levels: Of each depth so far, the candidates' probabilities, or the logarithms of these, `[B, C]`.
        least: None of what is no more probable may have children.
    """
    last, found = levels[-1], torch.cat(list(levels), 1)
    wanted = last > least
    if found.shape[1] >= size - 1:
        wanted &= last > found.topk(size - 1).values[:, -1:]
    return wanted


def _extended(frontier: Frontier, tokens: Tensor, parents: Tensor, real: Tensor, level: int) -> Frontier:
    """Return a frontier with new last nodes `[B, W]`; `parents` are counted from the present frontier's first."""
    places, width, parents = frontier.tokens.shape[1], tokens.shape[1], frontier.first + parents
    above = frontier.ancestors.gather(1, parents[:, :, None].expand(-1, -1, places))
    themselves = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    ancestors = torch.cat([F.pad(frontier.ancestors, (0, width)), torch.cat([above, themselves], 2)], 1)
    return Frontier(
        torch.cat([frontier.tokens, torch.where(real, tokens, frontier.tokens[:, :1])], 1),
        torch.cat([frontier.depths, torch.full_like(tokens, level)], 1),
        torch.cat([frontier.parents, parents], 1),
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

"""The draft tree: what every drafter proposes and the base verifies.

The contract every drafter keeps:

    A `TokenTree` lists its nodes by falling prefix probability, parents before children;
    any leading slice of it is a valid tree.

So the budget can cut each row's tree anywhere without asking the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAD_TOKEN = -1
"""Token of a padding node. No base ever chooses it, so padding is never accepted."""


@dataclass(frozen=True)
class TokenTree:
    """A batch of draft trees. Node 0 is the root: the row's pending token, of price 1.

    Args:
        tokens: `[B, N]` int64; `PAD_TOKEN` in padding nodes, which come last.
        parents: `[B, N]` int64 node index of the parent; the root and padding nodes name node 0.
        depths: `[B, N]` int64 distance from the root.
        log_prices: `[B, N]` float32 log prefix probability in the drafter's belief, falling; -inf in padding.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_prices: Tensor

    @property
    def size(self) -> int:
        """Number of nodes of each row, root and padding included."""
        return self.tokens.shape[1]

    def leading(self, nodes: int) -> TokenTree:
        """The tree of the first `nodes` nodes: the best tree of that size."""
        return TokenTree(
            self.tokens[:, :nodes], self.parents[:, :nodes], self.depths[:, :nodes], self.log_prices[:, :nodes]
        )

    def trimmed(self, sizes: Tensor) -> TokenTree:
        """The trees of each row's first `sizes` `[B]` nodes, the root among them, as wide as the largest."""
        tree = self.leading(int(sizes.max()))
        kept = torch.arange(tree.size, device=sizes.device) < sizes[:, None]
        return TokenTree(
            torch.where(kept, tree.tokens, PAD_TOKEN),
            torch.where(kept, tree.parents, 0),
            torch.where(kept, tree.depths, 1),
            torch.where(kept, tree.log_prices, -torch.inf),
        )

    def ancestors(self, depth: int | None = None) -> Tensor:
        """`[B, N, N]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.

        Args:
            depth: No node lies deeper; fewer steps suffice where it is known.

        For the tree 0 → 1 → 3, 0 → 2 (parents `[0, 0, 0, 1]`)::

            1 . . .
            1 1 . .
            1 . 1 .
            1 1 . 1

        Ancestor sets double in reach at each step, so a tree of depth D takes log2(D + 1) steps.
        """
        batch, nodes = self.parents.shape
        identity = torch.eye(nodes, dtype=torch.bool, device=self.parents.device)
        reach, hop, span = identity.expand(batch, nodes, nodes), self.parents, 1
        while span < min(nodes, nodes if depth is None else depth + 1):
            reach = reach | reach.gather(1, hop[:, :, None].expand(-1, -1, nodes))
            hop = hop.gather(1, hop)
            span *= 2
        return reach

    def paths(self, depth: int) -> Tensor:
        """`[B, N, depth]` tokens from below the root to each node; `PAD_TOKEN` after a path's end."""
        return self._along_paths(self.tokens, PAD_TOKEN, depth)

    def path_log_prices(self, depth: int) -> Tensor:
        """`[B, N, depth]` log prices from below the root to each node; -inf after a path's end."""
        return self._along_paths(self.log_prices, -torch.inf, depth)

    def _along_paths(self, values: Tensor, fill: float, depth: int) -> Tensor:
        """`values` `[B, N]` of the nodes on the way to each node, as `[B, N, depth]`."""
        ancestors = self.ancestors()
        place = (self.depths - 1)[:, None, :].expand_as(ancestors)
        wanted = ancestors & (place >= 0) & (place < depth)
        source = torch.where(wanted, values[:, None, :], fill)
        # Everything unwanted is written to a column that is then cut off.
        filled = values.new_full((*values.shape, depth + 1), fill)
        return filled.scatter(2, torch.where(wanted, place, depth), source)[..., :depth]


def root_only(pending: Tensor) -> TokenTree:
    """Trees that draft nothing: verifying them is plain decoding. `pending` is `[B]`."""
    tokens = pending[:, None]
    zeros = torch.zeros_like(tokens)
    return TokenTree(tokens, zeros, zeros, torch.zeros_like(tokens, dtype=torch.float32))


def from_nodes(
    pending: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, log_prices: Tensor, size: int
) -> TokenTree:
    """Make a tree of the `size` best of many candidate nodes.

    Args:
        pending: `[B]` token of the root.
        tokens: `[B, M]` candidate tokens, **in an order that puts parents before children**.
        parents: `[B, M]` index of each candidate's parent among the candidates, -1 for the root.
        depths: `[B, M]` or `[M]`, 1 below the root.
        log_prices: `[B, M]`, no child above its parent; -inf for a candidate that does not exist.
        size: Nodes of the result, root included; padded where there are fewer candidates.
    """
    batch, candidates = tokens.shape
    # A stable sort keeps parents before children of equal price.
    prices, order = torch.sort(log_prices, dim=1, descending=True, stable=True)
    keep = min(size - 1, candidates)
    prices, chosen = prices[:, :keep], order[:, :keep]
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(candidates, device=order.device).expand(batch, -1))
    exists = prices > -torch.inf
    parent = parents.gather(1, chosen)
    # +1: node 0 is the root.
    parent = torch.where(exists & (parent >= 0), rank.gather(1, parent.clamp_min(0)) + 1, 0)
    body = TokenTree(
        torch.where(exists, tokens.gather(1, chosen), PAD_TOKEN),
        parent,
        torch.where(exists, depths.expand(batch, -1).gather(1, chosen), 1),
        prices.float(),
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
        F.pad(tree.log_prices, missing, value=-torch.inf),
    )


def from_paths(pending: Tensor, paths: Tensor, log_prices: Tensor, size: int) -> TokenTree:
    """Merge paths into a trie: equal prefixes become one node, at the largest of their prices.

    Args:
        pending: `[B]` token of the root.
        paths: `[B, P, U]` continuations, `PAD_TOKEN` after a path's end.
        log_prices: `[B, P, U]` log price of each prefix, falling along a path.
        size: Nodes of the result, root included.
    """
    batch, count, depth = paths.shape
    same = torch.ones(batch, count, count, dtype=torch.bool, device=paths.device)
    index = torch.arange(count, device=paths.device)
    tokens, parents, prices = [], [], []
    before = torch.full((batch, count), -1, dtype=torch.long, device=paths.device)
    for level in range(depth):
        token, price = paths[:, :, level], log_prices[:, :, level].float()
        exists = token >= 0
        same = same & (token[:, :, None] == token[:, None, :]) & exists[:, :, None]
        # The first path with this prefix stands for all; `argmax` finds the first true.
        first = same.int().argmax(dim=2)
        best = price[:, None, :].masked_fill(~same, -torch.inf).amax(dim=2)
        tokens.append(token)
        parents.append(before)
        prices.append(best.masked_fill(~exists | (first != index), -torch.inf))
        before = torch.where(exists, first + level * count, -1)
    depths = torch.arange(1, depth + 1, device=paths.device).repeat_interleave(count)
    return from_nodes(
        pending, torch.cat(tokens, 1), torch.cat(parents, 1), depths.expand(batch, -1), torch.cat(prices, 1), size
    )


def merge(first: TokenTree, second: TokenTree, depth: int, size: int) -> TokenTree:
    """Merge two trees of the same rows as tries, each node at the larger of its prices.

    Args:
        depth: No node of either tree may be deeper.
        size: Nodes of the result, root included.
    """
    paths = torch.cat([first.paths(depth), second.paths(depth)], 1)
    log_prices = torch.cat([first.path_log_prices(depth), second.path_log_prices(depth)], 1)
    return from_paths(first.tokens[:, 0], paths, log_prices, size)

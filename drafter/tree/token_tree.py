"""The draft tree that a drafter proposes and the base verifies.

Every drafter keeps this contract:

    A `TokenTree` lists its nodes by falling prefix probability, parents before children;
    any leading slice of it is a valid tree.

So the budget can cut each row's tree to any size without asking the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD_TOKEN = -1
"""Token of a padding node. No base generates it, so padding is never accepted."""


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
        """N, number of nodes of each row, root and padding included."""
        return self.tokens.shape[1]

    def leading(self, nodes: int) -> TokenTree:
        """Return the trees of the first `nodes` nodes, root included: the best trees of that size."""
        return TokenTree(
            self.tokens[:, :nodes], self.parents[:, :nodes], self.depths[:, :nodes], self.log_probs[:, :nodes]
        )

    def trimmed(self, sizes: Tensor) -> TokenTree:
        """Return the trees of each row's first `sizes` `[B]` nodes, root included, padded to the largest."""
        tree = self.leading(int(sizes.max()))
        kept = torch.arange(tree.size, device=sizes.device) < sizes[:, None]
        return TokenTree(
            torch.where(kept, tree.tokens, PAD_TOKEN),
            torch.where(kept, tree.parents, 0),
            torch.where(kept, tree.depths, 1),
            torch.where(kept, tree.log_probs, -torch.inf),
        )

    def ancestors(self, depth: int | None = None) -> Tensor:
        """Return whether node `j` is node `i` or one of its ancestors, in entry `[b, i, j]` of `[B, N, N]` bool.

        Args:
            depth: Depth of the deepest node, if it is known. Then fewer steps suffice.

        For the tree 0 → 1 → 3, 0 → 2 (parents `[0, 0, 0, 1]`)::

            1 . . .
            1 1 . .
            1 . 1 .
            1 1 . 1

        Each step doubles how far back ancestors are known, so a tree of depth D takes log2(D + 1) steps.
        """
        batch, nodes = self.parents.shape
        identity = torch.eye(nodes, dtype=torch.bool, device=self.parents.device)
        reach, hop, span = identity.expand(batch, nodes, nodes), self.parents, 1
        while span < min(nodes, nodes if depth is None else depth + 1):
            reach = reach | reach.gather(1, hop[:, :, None].expand(-1, -1, nodes))
            hop = hop.gather(1, hop)
            span *= 2
        return reach

    def first_children(self) -> Tensor:
        """Return the first child of each node, its most probable one, `[B, N]` node ids; N where a node has none.

        For the tree 0 → 1 → 3, 0 → 2 that is `[1, 3, 4, 4]`.
        """
        ids = torch.arange(self.size, device=self.parents.device)
        drafted = torch.where((ids > 0) & (self.tokens >= 0), ids, self.size)
        return torch.full_like(self.parents, self.size).scatter_reduce(1, self.parents, drafted, "amin")

    def paths(self, depth: int) -> Tensor:
        """Return the tokens from below the root to each node, `[B, N, depth]`; `PAD_TOKEN` past a path's end."""
        return self._along_paths(self.tokens, PAD_TOKEN, depth)

    def path_log_probs(self, depth: int) -> Tensor:
        """Return the log-probabilities from below the root to each node, `[B, N, depth]`; -inf past a path's end."""
        return self._along_paths(self.log_probs, -torch.inf, depth)

    def _along_paths(self, values: Tensor, fill: float, depth: int) -> Tensor:
        """Return `values` `[B, N]` of the nodes on the path to each node, `[B, N, depth]`."""
        ancestors = self.ancestors()
        place = (self.depths - 1)[:, None, :].expand_as(ancestors)
        wanted = ancestors & (place >= 0) & (place < depth)
        source = torch.where(wanted, values[:, None, :], fill)
        # All other entries are written to a last column that is cut off.
        filled = values.new_full((*values.shape, depth + 1), fill)
        return filled.scatter(2, torch.where(wanted, place, depth), source)[..., :depth]


def root_only(pending: Tensor) -> TokenTree:
    """Return trees without draft nodes, of pending tokens `[B]`. Verifying them is plain decoding."""
    tokens = pending[:, None]
    zeros = torch.zeros_like(tokens)
    return TokenTree(tokens, zeros, zeros, torch.zeros_like(tokens, dtype=torch.float32))


def bare_trees(pending: Tensor, size: int) -> TokenTree:
    """Return trees `[B, size]` all of whose nodes are roots, of pending tokens `[B]`; a forward treats them as any."""
    return TokenTree(*(part.expand(len(pending), size) for part in vars(root_only(pending)).values()))

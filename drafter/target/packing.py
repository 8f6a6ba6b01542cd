"""Attention masks over a row's committed positions and the nodes of its draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter import devices


def tree_attention_mask(
    lengths: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    kv_length: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Which cached positions the last Q of N nodes see: `[B, Q, kv_length]` bool.

    A node sees the row's committed positions, its ancestors and itself. Node `j` of row `b` lies at cache index
    `lengths[b] + j` but at position `lengths[b] + depths[b, j]`; windows and chunks are counted in positions.

    With one committed position and the tree 0 → 1, 0 → 2 the mask is (columns: committed, nodes 0, 1, 2)::

        1 1 . .
        1 1 1 .
        1 1 . 1

    Args:
        lengths: `[B]` committed positions.
        depths: `[B, N]` depth of each node below the root.
        ancestors: `[B, Q, N]` bool, the last Q rows of `TokenTree.ancestors`; all of them, with Q = N, for whole trees.
        kv_length: Cache positions that attention reads.
        window: A sliding window: a node sees positions less than this far behind it.
        chunk: Chunked attention: a node sees only positions of its own chunk of this many.
    """
    asked, nodes = ancestors.shape[1:]
    index = torch.arange(kv_length, device=lengths.device)
    if nodes == 1 and window is None and chunk is None:  # plain decoding, where every operation counts
        return (index <= lengths[:, None])[:, None]
    node = index - lengths[:, None]  # [B, kv_length]: node id at each cache index, negative where committed
    in_tree = node.clamp(0, nodes - 1)
    seen = ancestors.gather(2, in_tree[:, None, :].expand(-1, asked, -1)) & (node < nodes)[:, None]
    seen = seen | (node < 0)[:, None]
    if window is None and chunk is None:
        return seen
    own = (lengths[:, None] + depths[:, nodes - asked :])[:, :, None]
    other = torch.where(node < 0, index, lengths[:, None] + depths.gather(1, in_tree))[:, None]
    if window is not None:
        seen = seen & (own - other < window)
    if chunk is not None:
        seen = seen & (own // chunk == other // chunk)
    return seen


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to attention scores: `[B, 1, N, kv_length]`, 0 or the dtype's lowest number."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)[:, None]


# ---- Forwards over trees, or prompts, of different sizes without padding: the nodes of all rows follow one another
# as one.


@dataclass(frozen=True)
class Packing:
    """Which nodes of `[B, N]` there are, and where.

    Args:
        nodes: `[M]` those that are there, row after row, as places in the flattened `[B * N]`.
        places: `[B, N]` where among the M each node is; anything valid for one that is not there.
    """

    nodes: Tensor
    places: Tensor

    @staticmethod
    def of(real: Tensor) -> Packing:
        """Of the nodes that are `real` `[B, N]` bool. Waits for the device."""
        places = (real.flatten().cumsum(0) - 1).clamp_min(0)
        return Packing(real.flatten().nonzero()[:, 0], places.view_as(real))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> Packing:
        """Of the first `counts` `[B]` nodes of each row, where the widest row has no padding."""
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        packing = Packing.of(real)
        return Packing(devices.send(packing.nodes, device), devices.send(packing.places, device))

    def pack(self, values: Tensor) -> Tensor:
        """`[1, M, ...]` of `[B, N, ...]`."""
        return values.flatten(0, 1).index_select(0, self.nodes)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """`[B, N, ...]` of `[1, M, ...]`; what is in nodes that are not there means nothing."""
        return packed[0].index_select(0, self.places.flatten()).unflatten(0, self.places.shape)  # type: ignore[no-any-return]

"""What runs the base's forward over tree nodes: the model's own code as it is, compiled, or something faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.base.kv_cache import KVCache
from drafter.base.packing import Packing


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of one forward. Row `b` of B has `lengths[b]` committed positions before its nodes.

    Args:
        tokens: `[B, N]` int64 node tokens; any valid id in padding.
        lengths: `[B]` int64 committed positions.
        depths: `[B, N]` int64 depth of each node below the root.
        ancestors: `[B, N, N]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.
        kv_length: Cache positions that attention reads; at least every row's length + N.
        packing: Which nodes are not padding, if only these are to be computed.
        hidden_layers: K hidden states to return, side by side; see `DecoderLayers.take`.
    """

    tokens: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    kv_length: int
    packing: Packing | None = None
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)


Executor = Callable[[KVCache, TreeNodes], tuple[Tensor, Tensor]]
"""From a cache, whose first B slots are the rows, and nodes to logits `[B, N, V]` and hidden states `[B, N, K · d]`."""

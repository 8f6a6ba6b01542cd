"""What tests see of the target model's cache, and how they ask for a forward over trees."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafter.target_model.attention import Packing
from drafter.target_model.cache import TargetCache
from drafter.target_model.kv_cache import KVCache
from drafter.target_model.nodes import TreeNodes


def kv_of(cache: TargetCache) -> KVCache:
    kv = cache.layers[0]
    assert isinstance(kv, KVCache)
    return kv


def tree_nodes(
    tokens: Tensor,
    lengths: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    kv_length: int,
    packing: Packing | None = None,
    **others: Any,
) -> TreeNodes:
    """Nodes behind `lengths` `[B]`, from their depths `[B, N]`."""
    return TreeNodes(
        tokens=tokens,
        lengths=lengths,
        positions=lengths[:, None] + depths,
        kv_length=kv_length,
        packing=packing,
        parents=(ancestors & (depths[:, None] == depths[:, :, None] - 1)).int().argmax(2),
        ancestors=ancestors,
        **others,
    )

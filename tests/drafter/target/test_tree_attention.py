"""Queries that share a KV head are one below another: the same attention, and no KV head is repeated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drafter.target.attention import TREE_ATTENTION, Packing, additive, folded, query_groups, tree_attention
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from tests.support.models import random_model

BATCH, HEADS, SHARED, NODES, SEEN, DIM = 2, 6, 2, 5, 11, 8


class Layer(nn.Module):
    num_key_value_groups = HEADS // SHARED


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, NODES, DIM)
    key, value = torch.randn(2, BATCH, SHARED, SEEN, DIM)
    mask = torch.rand(BATCH, NODES, SEEN) > 0.4
    mask[:, :, 0] = True
    return query, key, value, additive(mask, torch.float32)


def test_folded_attention_is_that_with_repeated_heads() -> None:
    query, key, value, mask = inputs()
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    found, _ = tree_attention(Layer(), query, key, value, folded(mask, HEADS // SHARED), scaling=0.3)
    assert torch.allclose(found, expected, atol=1e-6)


def test_packed_queries() -> None:
    query, key, value, mask = inputs()
    real = torch.arange(NODES) < torch.tensor([[5], [2]])
    packing = Packing.of(real)
    packed = packing.pack(query.transpose(1, 2)).transpose(1, 2)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask)
    found, _ = tree_attention(Layer(), packed, key, value, folded(mask, HEADS // SHARED), packing)
    assert torch.allclose(found[0], expected[real], atol=1e-6)


def test_a_layer_that_shares_heads_otherwise_gets_the_mask_of_the_nodes() -> None:
    query, _, _, mask = inputs()
    key, value = torch.randn(2, BATCH, HEADS, SEEN, DIM)
    layer = Layer()
    layer.num_key_value_groups = 1
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask)
    found, _ = tree_attention(layer, query, key, value, folded(mask, HEADS // SHARED))
    assert torch.allclose(found, expected, atol=1e-6)


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest result of any operation has that is not a view of its inputs."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
            self.most = max(self.most, result.numel())
        return result


def test_no_kv_head_is_repeated() -> None:
    base = BaseModel(random_model("llama"), native=False)
    rows, nodes, kv_length = 4, 6, 600
    ids, lengths = torch.ones(rows, nodes, dtype=torch.long), torch.full((rows,), kv_length - nodes)
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool).tril()
    tree = TreeNodes(ids, lengths, torch.arange(nodes).expand(rows, -1), ancestors, kv_length)
    cache = base.new_cache(rows, kv_length)

    def largest() -> int:
        with torch.inference_mode(), LargestResult() as noted:  # type: ignore[no-untyped-call]
            base.verify(cache, tree)
        return int(noted.most)

    repeated = rows * base.config.num_attention_heads * kv_length * base.config.head_dim
    assert query_groups(base.config) > 1
    assert largest() == repeated  # as transformers does it
    assert base.allow_packing()
    assert base.model.config._attn_implementation == TREE_ATTENTION
    assert largest() < repeated / query_groups(base.config)

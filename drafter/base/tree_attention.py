"""Attention of draft trees behind transformers' interface: packed queries, and each KV head read once.

Several query heads may share a KV head. PyTorch's attention with a mask wants as many KV heads as query heads, so
transformers repeats them: the whole KV cache, in every layer of every step. Here the queries that share a KV head stand
one below another instead, as if they were more nodes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafter.base.packing import Packing

TREE_ATTENTION = "tree_sdpa"
"""Name of `tree_attention` in transformers."""


def query_groups(config: Any) -> int:
    """How many query heads share a KV head in a model with the decoder configuration `config`, as far as it says."""
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    return heads // shared if heads and shared and heads % shared == 0 else 1


def folded(mask: Tensor, groups: int) -> Tensor:
    """The mask `[B, 1, N, S]` of nodes, for the queries of G `groups` one below another: `[B, 1, G · N, S]`."""
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, for packed queries where a `packing` is given, and for masks that are `folded`.

    Args:
        module: The layer.
        query: `[B, H, N, D]`; `[1, H, M, D]` with a packing.
        key: `[B, H', S, D]`.
        value: `[B, H', S, D]`.
        attention_mask: `[B, 1, N, S]` or `[B, 1, G · N, S]`.
        packing: Of the queries.
        settings: As for `sdpa`.

    Returns:
        `[B, N, H, D]`, or `[1, M, H, D]` with a packing, and no weights.
    """
    if packing is not None:
        query = packing.unpack(query.transpose(1, 2)).transpose(1, 2)
    mixed = _attend(module, query, key, value, attention_mask, settings)
    return (mixed if packing is None else packing.pack(mixed)), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    batch, heads, nodes, _ = query.shape
    shared = key.shape[1]
    if mask is None or mask.shape[2] == nodes or mask.shape[2] * shared != heads * nodes:
        # A layer whose heads are shared in another way than the configuration says needs the mask as it was.
        mask = mask if mask is None else mask[:, :, :nodes]
        mixed, _ = sdpa_attention_forward(module, query, key, value, mask, **settings)
        return mixed  # type: ignore[no-any-return]
    if settings.get("softcap") is not None or settings.get("position_bias") is not None:
        raise ValueError("tree attention knows no softcap and no position bias")
    below = query.reshape(batch, shared, -1, query.shape[-1])
    mixed = F.scaled_dot_product_attention(below, key, value, attn_mask=mask, scale=settings.get("scaling"))
    return mixed.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)

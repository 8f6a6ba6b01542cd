"""Attention of draft trees: masks, and attention behind transformers' interface that reads each KV head once.

Several query heads may share a KV head. PyTorch's attention with a mask wants as many KV heads as query heads, so
transformers repeats them: the whole KV cache, in every layer of every step. Here the queries that share a KV head stand
one below another instead, as if they were more nodes.

Where something reads rows to their own length, a layer that sees a whole text reads it in two parts; see
`prefix_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafter.base.packing import Packing
from drafter.base.prefix_attention import CommittedLayers, merge_tree, tree_part

_UNKNOWN = ("softcap", "position_bias", "s_aux")
"""Settings of an attention that this one does not know."""
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
    committed: CommittedLayers | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, for packed queries where a `packing` is given, and for masks that are `folded`.

    Args:
        module: The layer.
        query: `[B, H, N, D]`; `[1, H, M, D]` with a packing.
        key: `[B, H', S, D]`; in a layer that reads in two parts those of the nodes alone, like the queries.
        value: As `key`.
        attention_mask: `[B, 1, N, S]` or `[B, 1, G · N, S]`, where S is N in such a layer.
        packing: Of the queries.
        committed: What is committed, for layers that read in two parts.
        settings: As for `sdpa`.

    Returns:
        `[B, N, H, D]`, or `[1, M, H, D]` with a packing, and no weights.
    """
    own = None
    if committed is not None and (layer := int(module.layer_idx)) in committed.whole:  # type: ignore[arg-type]
        own = committed.layers[layer]
    if packing is not None:
        query = _unpacked(query, packing)
        if own is not None:
            key, value = _unpacked(key, packing), _unpacked(value, packing)
    if committed is not None and own is not None:
        assert attention_mask is not None
        mixed = _attend_in_parts(query, key, value, attention_mask, own, committed, settings)
    else:
        mixed = _attend(module, query, key, value, attention_mask, settings)
    return (mixed if packing is None else packing.pack(mixed)), None


def _unpacked(states: Tensor, packing: Packing) -> Tensor:
    """Return `[B, H, N, D]` of packed `[1, H, M, D]`."""
    return packing.unpack(states.transpose(1, 2)).transpose(1, 2)


def _refuse_unknown(settings: dict[str, Any]) -> None:
    if any(settings.get(one) is not None for one in _UNKNOWN):
        raise ValueError(f"tree attention knows no {' and no '.join(_UNKNOWN)}")


def _attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    own: tuple[Tensor, Tensor],
    committed: CommittedLayers,
    settings: dict[str, Any],
) -> Tensor:
    """Return `[B, N, H, D]` for queries `[B, H, N, D]`, the nodes' keys `[B, H', N, D]` and the layer's `own`."""
    prefix = committed.prefix
    _refuse_unknown(settings)
    batch, heads, nodes, dim = query.shape
    scale = settings.get("scaling") or dim**-0.5
    if committed.all_seen and prefix.parts == 1:  # plain decoding, where every operation counts
        return prefix.read(query.transpose(1, 2), *own, scale)[0]
    below = query.reshape(batch, key.shape[1], -1, dim)
    if mask.shape[2] != below.shape[2]:  # the heads are shared in another way than the configuration says
        mask = folded(mask[:, :, :nodes], heads // key.shape[1])
    merged, sums = prefix.read(below.transpose(1, 2), *own, scale)
    if not committed.all_seen:
        mixed, lse = tree_part(below, key, value, mask, scale)
        merged = merge_tree((merged, sums), (mixed.transpose(1, 2), lse.transpose(1, 2)))
    return merged.transpose(1, 2).reshape(batch, heads, nodes, dim).transpose(1, 2).contiguous()


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
    _refuse_unknown(settings)
    below = query.reshape(batch, shared, -1, query.shape[-1])
    mixed = F.scaled_dot_product_attention(below, key, value, attn_mask=mask, scale=settings.get("scaling"))
    return mixed.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)


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

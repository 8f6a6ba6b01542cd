"""Attention of draft trees, computed in two parts: over a row's committed positions, and over the tree itself.

The first part needs no mask, so a kernel can stop at each row's own length, known on the device only. Each part gives
attention outputs and log-sum-exps, with which the two merge exactly (Milakov and Gimelshein 2018; tree attention as in
Cascade inference).

On a GPU in half precision the first part is PyTorch's flash attention (Dao 2023), called as `varlen_attn` calls it: the
public function has no lengths on the device before torch 2.12. Elsewhere attention is masked; see `tree_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafter import devices

_PART, _BUSY, _WORTH = 256, 256, 8
"""Split-KV: a row's positions are split into parts until rows × KV heads × parts reach `_BUSY`, as a GPU has some
hundred processors. A part has at least `_PART` positions, and `_WORTH` times its queries, which each part copies."""
_UNKNOWN = ("softcap", "position_bias", "s_aux")  # settings that `tree_attention` does not support
TREE_ATTENTION = "tree_sdpa"

Parts = tuple[Tensor, Tensor]
"""Attention outputs `[..., D]` and float32 log-sum-exps of the scores `[...]`, -inf where nothing was seen."""


@dataclass(frozen=True)
class Packing:
    """Index of the nodes of `[B, N]` that are not padding, for forwards over trees of different sizes.

    Only attention needs to know the row of a node: there the queries are laid out by rows again.
    """

    nodes: Tensor  # `[M]` the nodes, row after row, as indices into the flattened `[B * N]`
    places: Tensor  # `[B, N]` index of each node among the M; anything valid for padding

    @staticmethod
    def of(real: Tensor) -> Packing:
        """Index the nodes that are `real` `[B, N]` bool. Waits for the device."""
        places = (real.flatten().cumsum(0) - 1).clamp_min(0)
        return Packing(real.flatten().nonzero()[:, 0], places.view_as(real))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> Packing:
        """Index the first `counts` `[B]` nodes of each row, where the widest row has no padding."""
        packing = Packing.of(torch.arange(max(counts)) < torch.tensor(counts)[:, None])
        return Packing(devices.send(packing.nodes, device), devices.send(packing.places, device))

    def pack(self, values: Tensor) -> Tensor:
        """Pack `[B, N, ...]` to `[1, M, ...]`."""
        return values.flatten(0, 1).index_select(0, self.nodes)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack `[1, M, ...]` to `[B, N, ...]`; padding is undefined."""
        return packed[0].index_select(0, self.places.flatten()).unflatten(0, self.places.shape)  # type: ignore[no-any-return]


class Prefix:
    """Positions to read of B rows. Row `b` is slot `b` of S slots. Made once for all layers.

    Args:
        lengths: `[B]` int64 positions of each row to read, from the first on.
        slot: L, positions of a slot.
        parts: P, equal parts into which the positions of a slot are split.
        attend: Kernel that reads them.
        queries: Queries of each row, unless a layer has others.
        some: No length is 0.
    """

    def __init__(
        self, lengths: Tensor, slot: int, parts: int, attend: PrefixAttention, queries: int, *, some: bool = False
    ) -> None:
        self.lengths, self.slot, self.parts, self.attend, self.queries = lengths, slot, parts, attend, queries
        rows, size, device = len(lengths), -(-slot // parts), lengths.device
        part = torch.arange(parts, device=device) * size
        row = torch.arange(rows, device=device)[:, None] * slot
        used = (lengths[:, None] - part).clamp(0, size).int()
        # Positions of each part to read, `[B · P]` int32, and the first of them, `[B · P + 1]`; its last is not used.
        self.used, self.starts = used.flatten(), F.pad((row + part).flatten(), (0, 1)).int()
        # `[B · P + 1]` int32 first query of each part, if each has all of its row's.
        self.asked = _every(queries, rows * parts, device)
        # `[P, B, 1, 1]` bool: parts of which nothing is read; None if something is read of all.
        self.unseen = None if some and parts == 1 else (used == 0).T[:, :, None, None]

    def read(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Parts:
        """Attend to these positions of keys and values `[S · L, H', D]`; return `[B, Q, H, D]` and `[B, Q, H]`.

        Args:
            query: `[B, Q, H, D]`. H is H'; or with one query and one part a multiple of it, and only the values count.
        """
        return self.attend(query, key, value, self, scale)


PrefixAttention = Callable[[Tensor, Tensor, Tensor, Prefix, float], Parts]
"""Signature of `Prefix.read`, with the prefix as an argument."""


@dataclass(frozen=True)
class CommittedLayers:
    """Committed positions as the layers of one forward over trees read them."""

    layers: list[tuple[Tensor, Tensor]]  # keys and values `[S · L, H', D]` of each layer
    whole: frozenset[int]  # layers without window or chunks, which read in two parts
    prefix: Prefix
    all_seen: bool = False  # each row has one node, whose own position is in `prefix`: there is no second part


def merge_attention(values: Tensor, lses: Tensor) -> Parts:
    """Merge attention over P disjoint sets of positions, `[P, ..., D]` and `[P, ...]`, into that over their union.

    The log-sum-exp of an empty set is -inf; its values must be finite.
    """
    # Clamped because -inf minus -inf, if all sets are empty, would be NaN.
    largest = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)
    shares = (lses - largest).exp()
    total = shares.sum(0)
    mixed = (values * shares[..., None]).sum(0) / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return mixed.to(values.dtype), largest + total.log()


def merge_tree(before: Parts, tree: Parts) -> Tensor:
    """Merge attention to committed positions, which may be none, and to a tree. Cheaper than `merge_attention`."""
    share = (before[1] - tree[1]).sigmoid()[..., None]
    return torch.lerp(tree[0].float(), before[0].float(), share).to(tree[0].dtype)


def parts_of(rows: int, heads: int, queries: int, slot: int) -> int:
    """Return the number of parts into which to split the positions of a slot; `queries` share one of the KV `heads`."""
    return max(1, min(-(-slot // max(_PART, _WORTH * queries)), _BUSY // (rows * heads)))


def masked_prefix_attention(query: Tensor, key: Tensor, value: Tensor, prefix: Prefix, scale: float) -> Parts:
    """Reference for every `PrefixAttention`: read all positions and mask."""
    rows, groups = len(query), query.shape[2] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    key, value = (one.unflatten(0, (-1, prefix.slot))[:rows].float() for one in (key, value))
    scores = torch.einsum("bqhd,blhd->bqhl", query.float(), key) * scale
    unseen = torch.arange(prefix.slot, device=query.device) >= prefix.lengths[:, None]
    scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
    shares = (scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)).exp()
    total = shares.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.einsum("bqhl,blhd->bqhd", shares / total, value).to(query.dtype), scores.logsumexp(-1)


def flash_prefix_attention(query: Tensor, key: Tensor, value: Tensor, prefix: Prefix, scale: float) -> Parts:
    """Run PyTorch's variable-length flash attention, with each part of each row as a sequence.

    For single queries whose heads share KV heads the kernel splits the positions by itself.
    """
    rows, queries = query.shape[:2]
    parts, size = prefix.parts, -(-prefix.slot // prefix.parts)
    firsts = prefix.asked if queries == prefix.queries else _every(queries, rows * parts, query.device)
    # Of the parts only the beginnings are read where `seqused_k` is given.
    asked = query[:, None].expand(-1, parts, -1, -1, -1).reshape(-1, *query.shape[2:])
    mixed, lse, *_ = torch.ops.aten._flash_attention_forward(
        asked, key, value, firsts, prefix.starts, queries, size, 0.0, False, False, scale=scale, seqused_k=prefix.used
    )
    values = mixed.view(rows, parts, *query.shape[1:]).transpose(0, 1)
    lses = lse.view(-1, rows, parts, queries).permute(2, 1, 3, 0)
    if prefix.unseen is not None:  # the kernel returns +inf for an empty sequence
        lses = lses.masked_fill(prefix.unseen, -torch.inf)
    return (values[0], lses[0]) if parts == 1 else merge_attention(values, lses)


def _every(size: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count + 1, device=device, dtype=torch.int32) * size


def tree_part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Parts:
    """Attend from `[B, H', Q, D]` to the row's own tree, keys and values `[B, H', N, D]`.

    `mask` `[B, 1, Q, N]` is added to the scores; on a GPU each row of it begins at a multiple of 8. Returns
    `[B, H', Q, D]` and `[B, H', Q]`.
    """
    if query.device.type == "cuda":
        bias = mask.expand(-1, query.shape[1], -1, -1)
        mixed, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, scale=scale
        )
        return mixed, lse[..., : query.shape[2]]
    scores = query.float() @ key.float().mT * scale + mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


@torch.inference_mode()
def prefix_attention_agrees(
    attend: PrefixAttention, heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether it runs on `device` and agrees with `masked_prefix_attention` for several lengths and parts."""
    random, slot = torch.Generator().manual_seed(0), 3 * _PART
    query, keys = (torch.randn(size, heads, dim, generator=random, dtype=torch.float32) for size in (2 * 5, 2 * slot))
    query, keys = query.view(2, 5, heads, dim).to(device, dtype), keys.to(device, dtype)
    lengths = torch.tensor([slot - 7, 0], device=device)
    prefix = Prefix(lengths, slot, 3, attend, 5)
    try:
        found, lse = prefix.read(query, keys, keys.flip(0), dim**-0.5)
    except (RuntimeError, TypeError):
        return False
    expected, sums = masked_prefix_attention(query, keys, keys.flip(0), prefix, dim**-0.5)
    near = torch.allclose(found.float(), expected.float(), atol=2e-2)
    return near and torch.allclose(lse, sums, atol=2e-2)


def prefix_attention_on(device: torch.device, dtype: torch.dtype) -> PrefixAttention | None:
    """Return the kernel that reads rows to their own length there, not yet proved (see `BaseModel`), or None."""
    half = dtype in (torch.float16, torch.bfloat16)
    return flash_prefix_attention if device.type == "cuda" and half else None


def query_groups(config: Any) -> int:
    """Return how many query heads share a KV head, by the decoder configuration `config`; 1 if it does not say."""
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    return heads // shared if heads and shared and heads % shared == 0 else 1


def folded(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask `[B, 1, N, S]` for G `groups` of queries: `[B, 1, G · N, S]`."""
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
    """Attend like transformers' `sdpa`, with support for packed queries, `folded` masks and reading in two parts.

    Args:
        query: `[B, H, N, D]`; `[1, H, M, D]` with a packing.
        key: `[B, H', S, D]`; in a layer that reads in two parts the nodes' alone, like the queries.
        attention_mask: `[B, 1, N, S]` or `[B, 1, G · N, S]`, where S is N in a layer that reads in two parts.

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
    if committed.all_seen and prefix.parts == 1:  # plain decoding, where every kernel launch counts
        return prefix.read(query.transpose(1, 2), *own, scale)[0]
    below = query.reshape(batch, key.shape[1], -1, dim)
    if mask.shape[2] != below.shape[2]:  # the layer groups its heads differently from the configuration
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
        # A layer that groups its heads differently from the configuration needs the mask unfolded.
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
    positions: Tensor,
    ancestors: Tensor,
    kv_length: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the cached positions that each of N nodes sees: `[B, N, kv_length]` bool.

    A node sees the row's committed positions, its ancestors and itself. Node `j` of row `b` lies at cache index
    `lengths[b] + j` but at position `positions[b, j]`; windows and chunks are counted in positions.

    With one committed position and the tree 0 → 1, 0 → 2 the mask is (columns: committed, nodes 0, 1, 2)::

        1 1 . .
        1 1 1 .
        1 1 . 1

    Args:
        lengths: `[B]` committed positions.
        positions: `[B, N]`.
        ancestors: `[B, N, N]` bool, as `TokenTree.ancestors`.
        window: A node sees positions less than this far behind it.
        chunk: A node sees only positions of its own chunk of this size.
    """
    nodes = ancestors.shape[1]
    index = torch.arange(kv_length, device=lengths.device)
    if nodes == 1 and window is None and chunk is None:  # plain decoding, where every kernel launch counts
        return (index <= lengths[:, None])[:, None]
    node = index - lengths[:, None]  # [B, kv_length]: node id at each cache index, negative where committed
    in_tree = node.clamp(0, nodes - 1)
    seen = ancestors.gather(2, in_tree[:, None, :].expand(-1, nodes, -1)) & (node < nodes)[:, None]
    seen = seen | (node < 0)[:, None]
    if window is None and chunk is None:
        return seen
    own = positions[:, :, None]
    other = torch.where(node < 0, index, positions.gather(1, in_tree))[:, None]
    if window is not None:
        seen = seen & (own - other < window)
    if chunk is not None:
        seen = seen & (own // chunk == other // chunk)
    return seen


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask into an additive one `[B, 1, N, kv_length]`: 0 or the dtype's lowest number."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)[:, None]

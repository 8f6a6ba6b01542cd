"""Attention in two parts: what a row has committed, which all nodes of its tree see as a whole, and the tree itself.

The first part needs no mask, so a kernel can stop at each row's own end, whose place only the device need know. The
second is small. Each part gives the mixed values and the logarithm of the sum of its exponential scores; with these the
two are merged as if there had been one softmax (Milakov and Gimelshein 2018; tree attention as in Cascade inference).

On a GPU in half precision the first part is PyTorch's flash attention (Dao 2023), called as `varlen_attn` calls it: the
public function has no lengths on the device before torch 2.12. Elsewhere there is no kernel that reads rows to their
own length, and attention stays masked; see `tree_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafter.target.packing import Packing

_PART, _BUSY, _WORTH = 256, 256, 8
"""A row's positions are shared out to parts of at least so many, until there are so many pieces of work, one for each
row, KV head and part: a kernel does one piece after another of a row, and a GPU has some hundred processors. Each part
has its own copy of the queries and of what comes of them, so it has this many times as many positions at least."""

Parts = tuple[Tensor, Tensor]
"""Mixed values `[..., D]`, and float32 log-sum-exps of the scores `[...]`; -inf where nothing was seen."""


@dataclass(frozen=True)
class Prefix:
    """Which positions are read of B rows. Row `b` is slot `b` of S slots. Made by `of`, once for all layers.

    Args:
        lengths: `[B]` int64: the first so many positions of each row.
        slot: L, positions of a slot.
        parts: P, into how many parts of equal length the positions of a slot are shared out.
        attend: How they are read.
        queries: How many queries each row has, unless a layer has others.
        starts: `[B · P + 1]` int32 first position of each part among all. One more than there are parts, and not used.
        used: `[B · P]` int32 how many positions of each part are read.
        asked: `[B · P + 1]` int32 first query of each part, if each has all of its row's.
        unseen: `[P, B, 1, 1]` bool: the parts of which nothing is read; None if something is read of all.
    """

    lengths: Tensor
    slot: int
    parts: int
    attend: PrefixAttention
    queries: int
    starts: Tensor
    used: Tensor
    asked: Tensor
    unseen: Tensor | None

    @classmethod
    def of(
        cls, lengths: Tensor, slot: int, parts: int, attend: PrefixAttention, queries: int, *, some: bool = False
    ) -> Prefix:
        """Find where the parts lie.

        Args:
            lengths: See `Prefix`.
            slot: See `Prefix`.
            parts: See `Prefix`.
            attend: See `Prefix`.
            queries: See `Prefix`.
            some: Whether no length is 0.
        """
        rows, size, device = len(lengths), -(-slot // parts), lengths.device
        part = torch.arange(parts, device=device) * size
        used = (lengths[:, None] - part).clamp(0, size).int()
        row = torch.arange(rows, device=device)[:, None] * slot
        starts = torch.nn.functional.pad((row + part).flatten(), (0, 1)).int()
        unseen = None if some and parts == 1 else (used == 0).T[:, :, None, None]
        return cls(
            lengths, slot, parts, attend, queries, starts, used.flatten(), _every(queries, rows * parts, device), unseen
        )

    def read(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Parts:
        """Attend to them.

        Args:
            query: `[B, Q, H, D]`. H is H'; or with one query and one part a multiple of it, and only the values count.
            key: `[S · L, H', D]`.
            value: `[S · L, H', D]`.
            scale: Of the scores.

        Returns:
            `[B, Q, H, D]` and `[B, Q, H]`.
        """
        return self.attend(query, key, value, self, scale)


PrefixAttention = Callable[[Tensor, Tensor, Tensor, Prefix, float], Parts]
"""As `Prefix.read`, which is given where to read."""


@dataclass(frozen=True)
class CommittedLayers:
    """What the layers of one forward over trees need to know of the committed positions.

    Args:
        layers: Keys and values `[S · L, H', D]` of each layer.
        whole: The layers that see all of them.
        prefix: Which positions these are.
        all_seen: Whether they are all that a node sees: each row has one node, and its own position is among them.
    """

    layers: list[tuple[Tensor, Tensor]]
    whole: frozenset[int]
    prefix: Prefix
    all_seen: bool = False


def merge_attention(values: Tensor, lses: Tensor) -> Parts:
    """Merge attention over several sets of positions into attention over all of them.

    Args:
        values: `[P, ..., D]` mixed values of P sets.
        lses: `[P, ...]` float32; -inf for a set of nothing, whose values must be finite.
    """
    # If all sets are empty the largest is -inf, and minus itself that would be NaN.
    largest = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)
    shares = (lses - largest).exp()
    total = shares.sum(0)
    mixed = (values * shares[..., None]).sum(0) / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return mixed.to(values.dtype), largest + total.log()


def merge_tree(before: Parts, tree: Parts) -> Tensor:
    """Merge attention to committed positions, which may be none, and to a tree; the same in fewer operations."""
    share = (before[1] - tree[1]).sigmoid()[..., None]
    return torch.lerp(tree[0].float(), before[0].float(), share).to(tree[0].dtype)


def parts_of(rows: int, heads: int, queries: int, slot: int) -> int:
    """Into how many parts to share out the positions of a slot.

    Args:
        rows: Rows of the forward.
        heads: KV heads.
        queries: Queries of a row that share a KV head.
        slot: Positions of a slot.
    """
    return max(1, min(-(-slot // max(_PART, _WORTH * queries)), _BUSY // (rows * heads)))


def masked_prefix_attention(query: Tensor, key: Tensor, value: Tensor, prefix: Prefix, scale: float) -> Parts:
    """The same as a `PrefixAttention` is to compute, by reading all positions and masking: what others are held to."""
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
    """By PyTorch's flash attention for sequences of different lengths: each part of each row is a sequence.

    For single queries whose heads share KV heads the kernel shares out positions by itself.
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
    if prefix.unseen is not None:  # the kernel says +inf of a sequence without a position
        lses = lses.masked_fill(prefix.unseen, -torch.inf)
    return (values[0], lses[0]) if parts == 1 else merge_attention(values, lses)


def _every(size: int, count: int, device: torch.device) -> Tensor:
    """Return `[count + 1]` int32 beginnings of pieces of one size."""
    return torch.arange(count + 1, device=device, dtype=torch.int32) * size


def tree_part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Parts:
    """Attention of nodes to the nodes of their own tree.

    Args:
        query: `[B, H', Q, D]`.
        key: `[B, H', N, D]`.
        value: `[B, H', N, D]`.
        mask: `[B, 1, Q, N]` numbers that are added to the scores; on a GPU each row of it begins at a multiple of 8.
        scale: Of the scores.

    Returns:
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
    """Whether it runs there, and gives what `masked_prefix_attention` gives, for rows of several lengths and parts."""
    random, slot = torch.Generator().manual_seed(0), 3 * _PART
    query, keys = (torch.randn(size, heads, dim, generator=random, dtype=torch.float32) for size in (2 * 5, 2 * slot))
    query, keys = query.view(2, 5, heads, dim).to(device, dtype), keys.to(device, dtype)
    lengths = torch.tensor([slot - 7, 0], device=device)
    prefix = Prefix.of(lengths, slot, 3, attend, 5)
    try:
        found, lse = prefix.read(query, keys, keys.flip(0), dim**-0.5)
    except (RuntimeError, TypeError):
        return False
    expected, sums = masked_prefix_attention(query, keys, keys.flip(0), prefix, dim**-0.5)
    near = torch.allclose(found.float(), expected.float(), atol=2e-2)
    return near and torch.allclose(lse, sums, atol=2e-2)


def prefix_attention_on(device: torch.device, dtype: torch.dtype) -> PrefixAttention | None:
    """What reads rows to their own length there; None where nothing does. It is yet to be proved; see `BaseModel`."""
    has = hasattr(torch.ops.aten, "_flash_attention_forward")
    half = dtype in (torch.float16, torch.bfloat16)
    return flash_prefix_attention if device.type == "cuda" and half and has else None


# ---- Attention of draft trees: masks, and attention behind transformers' interface that reads each KV head once.

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

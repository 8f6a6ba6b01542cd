"""The attention draft module (Wen, Gui, Feng 2024, arXiv 2412.00061, section 3.1).

Every token is fused with the base's hidden state at the position before it, `f_i = W [e(x_i); h_{i-1}]`. From the
fused entry of the pending token, `T` frame queries `f_t + s_j` go through transformer layers in which each frame
attends to the fused context and to the other frames. One forward, never a loop over tokens.

Training and decoding run the same `AttentionModule.frames`; they differ in where keys and values lie and in the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.contract import DraftModule, FrameReader

Ids = npt.NDArray[np.int64]
Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys `[B, S, H, D]`, new values) → all keys and values to attend to, `[B, S', H, D]`."""

_CONTEXT_BUCKET = 64
"""Context lengths are rounded up to this, so that shapes repeat."""
_PROMPT_ENTRIES = 4096
"""Entries of prompts that are read at once."""


class _Layer(nn.Module):
    """Pre-norm attention from the frames to context and frames, then a gated MLP on the frames.

    The context passes every layer unchanged: a layer only takes keys and values from it.
    """

    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # LayerNorm rather than RMSNorm: one kernel instead of five on a CPU.
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def project(self, entries: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, S, H, D]` of entries `[B, S, d]`, the first two rotated to their positions."""
        qkv = self.qkv(self.attention_norm(entries)).unflatten(2, (3, self.num_heads, -1))
        queries, keys = _rotate(qkv[:, :, :2], cos, sin).unbind(2)
        return queries, keys, qkv[:, :, 2]

    def forward(self, frames: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Frames `[B, F, d]` → `[B, F, d]`; see `AttentionModule.frames`.

        Args:
            frames: `[B, F, d]`.
            queries: `[B, F, H, D]`.
            keys: `[C, S', H, D]`; where `C` is not `B`, the frames are those of C rows, one after another.
            values: The same.
            mask: Broadcastable to `[C, 1, B·F/C, S']`.
        """
        queries = queries.reshape(keys.shape[0], -1, *queries.shape[2:])
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        frames = frames + self.out(mixed.transpose(1, 2).reshape(frames.shape))
        gate, up = self.gate_up(self.mlp_norm(frames)).chunk(2, -1)
        return frames + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `heads` `[B, S, 2, H, D]`, `cos` and signed `sin` `[B, S, 1, 1, D]` (first half negative)."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


class AttentionModule(DraftModule):
    """Frames that attend to the whole text and to each other.

    Args:
        width: d.
        num_frames: T.
        num_layers: Transformer layers.
        num_heads: Attention heads; even width each.
        intermediate_size: Width of the gated MLP.
        rope_theta: Base of the rotary positions.
    """

    def __init__(
        self, width: int, num_frames: int, num_layers: int, num_heads: int, intermediate_size: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.width, self.num_frames, self.num_heads, self.rope_theta = width, num_frames, num_heads, rope_theta
        self.embedding_norm = nn.LayerNorm(width)
        self.hidden_norm = nn.LayerNorm(width)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.5 * torch.randn(num_frames, width))
        self.layers = nn.ModuleList(_Layer(width, num_heads, intermediate_size) for _ in range(num_layers))

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Fused entries `[..., d]`: embeddings `e(x_i)` `[..., d]` with hidden states `h_{i-1}` `[..., d]`."""
        return self.fusion(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden_before)], -1))  # type: ignore[no-any-return]

    def rotation(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Table `[length, 2, D]` of cosine and signed sine (first half negative) for positions `0..length-1`."""
        half = self.width // self.num_heads // 2
        rates = self.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angles = torch.arange(length, device=device)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)

    def frames(
        self, context: Tensor, starts: Tensor, count: int, rotation: Tensor, mask: Tensor, memory: Memory
    ) -> Tensor:
        """The first F frames' last states: the one forward that training and decoding share.

        Args:
            context: `[B, W, d]` fused entries whose keys and values are not in the memory yet.
            starts: `[B, A, d]` fused entry of the pending token of each anchor. In decoding B is 1: the entries of all
                rows come in one list, and the rows are its anchors.
            count: F.
            rotation: `[B, W + A·F, 2, D]` cosine and signed sine at the entries' positions, context first.
            mask: bool, broadcastable to `[C, 1, B·A·F/C, S']`: what each frame may attend to among what `memory`
                returns, which are C texts.
            memory: Takes a layer's new keys and values, returns those to attend to.

        Returns:
            `[B, A, F, d]`, before any output norm.
        """
        frames = (starts[:, :, None] + self.slots[:count]).flatten(1, 2)
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            queries, keys, values = layer.project(torch.cat([context, frames], 1), cos, sin)
            frames = layer(frames, queries[:, context.shape[1] :], *memory(index, keys, values), mask)
        return frames.view(frames.shape[0], starts.shape[1], count, -1)

    def remember(self, context: Tensor, rotation: Tensor, store: Callable[[int, Tensor, Tensor], None]) -> None:
        """Hand a memory the keys and values of entries, for frames to come; see `frames`."""
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            store(index, *layer.project(context, cos, sin)[1:])

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Frames `[B, A, F, d]`; see `DraftModule.forward`."""
        batch, length, _ = embeddings.shape
        frames = count or self.num_frames
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        context = self.fuse(embeddings, before)
        starts = context.gather(1, anchors[:, :, None].expand(-1, -1, context.shape[-1]))
        place = torch.arange(length, device=anchors.device)
        own = torch.arange(1, frames + 1, device=anchors.device)
        positions = torch.cat([place.expand(batch, -1), (anchors[:, :, None] + own).flatten(1)], 1)
        rotation = self.rotation(length + frames, hidden.device, context.dtype)[positions]
        sees_context = (place <= anchors[:, :, None]).repeat_interleave(frames, 1)
        anchor = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(frames)
        sees_frames = (anchor[:, None] == anchor).expand(batch, -1, -1)
        mask = torch.cat([sees_context, sees_frames], 2)[:, None]
        return self.frames(context, starts, frames, rotation, mask, lambda _, keys, values: (keys, values))

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """A reader that keeps the keys and values of the fused context for every slot."""
        return _AttentionReader(self, base, fresh)


@dataclass(frozen=True)
class _Entries:
    """Some entries of the text of some slots, in one list.

    Args:
        slots: `[E]` the slot of each.
        back: `[E]` how far each is from its slot's pending token.
    """

    slots: Tensor
    back: Tensor


class _AttentionReader(FrameReader):
    """Reads each row's new tokens into a KV cache of the fused context, allocated once, and computes the frames."""

    def __init__(self, module: AttentionModule, base: BaseModel, fresh: int) -> None:
        self._module, self._base = module, base
        self._read: list[int] = []  # entries of each slot whose keys and values are in the cache
        # A GPU's host does not know how many are new: it is a step behind. There every row has the same number read.
        self._behind = devices.is_asynchronous(base.device)
        self._usual = 2 * fresh if self._behind else fresh
        self._new = np.zeros(0, dtype=np.int64)  # entries of each row that `read` has to read

    def open(self, slots: int, length: int) -> None:
        module, device, dtype = self._module, self._base.device, self._base.dtype
        self._length = length + module.num_frames + 1
        shape = (len(module.layers), 2, slots * self._length, module.num_heads, module.width // module.num_heads)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._rotation = module.rotation(self._length, device, dtype)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(slots, device=device)
        self._read = [0] * slots

    def enter(self, slot: int) -> None:
        self._read[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        # A token's entry is made of it and of the hidden state before it, so common tokens have common entries.
        known = min(self._read[source], length)
        texts = self._cache.unflatten(2, (-1, self._length))
        texts[:, :, target, :known] = texts[:, :, source, :known]
        self._read[target] = known

    def move(self, source: int, target: int) -> None:
        self.copy(source, target, self._read[source])

    def clear(self, slot: int) -> None:
        self._cache.unflatten(2, (-1, self._length))[:, :, slot] = 0

    def prepare(self, context: DraftContext) -> None:
        known = np.array(context.host_lengths, dtype=np.int64)
        new = known + (context.ahead + 1) - np.array(self._read[: len(known)], dtype=np.int64)
        late = new > self._usual
        if late.any():
            slots, back = _last_entries(late.nonzero()[0], new[late])
            for first in range(0, len(slots), _PROMPT_ENTRIES):
                some = slice(first, first + _PROMPT_ENTRIES)
                self._remember(context, self._sent(slots[some], back[some]))
        # The pending token's entry is always read: the frames start from it.
        self._new = np.where(late, 1, new.clip(1))
        self._read[: len(known)] = (known + 1).tolist()

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        module, rows = self._module, context.tokens.shape[0]
        frames = count or module.num_frames
        entries, ends = self._recent(rows)
        positions, fused = self._fused(context, entries)
        ahead = context.lengths[:, None] + torch.arange(1, frames + 1, device=positions.device)
        # The frames' own keys and values go behind the pending token's, where later entries overwrite them.
        places = torch.cat(
            [positions + entries.slots * self._length, (ahead + self._slot[:rows, None] * self._length).flatten()]
        )
        bound = -(-(context.longest + 1 + frames) // _CONTEXT_BUCKET) * _CONTEXT_BUCKET
        bound = min(bound, self._length)
        mask = (self._place[:bound] <= context.lengths[:, None] + frames)[:, None, None]
        texts = self._cache.unflatten(2, (-1, self._length))[:, :, :rows, :bound]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._store(places, layer, keys, values)
            return texts[layer, 0], texts[layer, 1]

        rotation = self._rotation[torch.cat([positions, ahead.flatten()])]
        return module.frames(fused[None], fused[None, ends], frames, rotation[None], mask, memory)[0]

    def _remember(self, context: DraftContext, entries: _Entries) -> None:
        """Read entries whose frames nobody wants."""
        positions, fused = self._fused(context, entries)
        store = partial(self._store, positions + entries.slots * self._length)
        self._module.remember(fused[None], self._rotation[positions][None], store)

    def _store(self, places: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        self._cache[layer, 0].index_copy_(0, places, keys[0])
        self._cache[layer, 1].index_copy_(0, places, values[0])

    def _fused(self, context: DraftContext, entries: _Entries) -> tuple[Tensor, Tensor]:
        """Positions `[E]` of the entries and themselves `[E, d]`."""
        assert context.hidden is not None
        slots = entries.slots
        # Of a short text some may be asked for several times: the first entry is always the same.
        positions = (context.lengths[slots] - entries.back).clamp_min(0)
        hidden = context.hidden[slots, (positions - 1).clamp_min(0)].to(self._base.dtype) * (positions > 0)[:, None]
        return positions, self._module.fuse(self._base.embed(context.tokens[slots, positions]), hidden)

    def _recent(self, rows: int) -> tuple[_Entries, Tensor]:
        """What `rows` rows may have new, and which of these are the pending tokens' `[rows]`."""
        if not self._behind:
            return self._sent(*_last_entries(np.arange(rows), self._new)), torch.from_numpy(self._new.cumsum() - 1)
        back = torch.arange(self._usual - 1, -1, -1, device=self._slot.device)
        slots = self._slot[:rows, None].expand(-1, self._usual)
        return _Entries(slots.flatten(), back.repeat(rows)), (self._slot[:rows] + 1) * self._usual - 1

    def _sent(self, slots: Ids, back: Ids) -> _Entries:
        device = self._base.device
        return _Entries(*(devices.send(torch.from_numpy(part), device) for part in (slots, back)))


def _last_entries(slots: Ids, counts: Ids) -> tuple[Ids, Ids]:
    """Slots and distances from the pending token of the last `counts` `[B]` entries of `slots` `[B]`."""
    ends = counts.cumsum()
    return slots.repeat(counts), ends.repeat(counts) - 1 - np.arange(counts.sum())

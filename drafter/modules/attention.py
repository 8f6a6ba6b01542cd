"""The attention draft module (Wen, Gui, Feng 2024, arXiv 2412.00061, section 3.1).

Every token is fused with the base's hidden state at the position before it, `f_i = W [e(x_i); h_{i-1}]`. From the
fused entry of the pending token, `T` frame queries `f_t + s_j` go through transformer layers in which each frame
attends to the fused context and to the other frames. One forward, never a loop over tokens.

Training and decoding run the same `AttentionModule.frames`; they differ in where keys and values lie and in the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.base_model import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.modules.contract import DraftModule, FrameReader

Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys `[B, S, H, D]`, new values) → all keys and values to attend to, `[B, S', H, D]`."""

_CONTEXT_BUCKET = 64
"""Context lengths are rounded up to this, so that shapes repeat."""
_PROMPT_ENTRIES = 4096
"""Entries of prompts that are read at once; a longer prompt is read as a whole."""
_SMALL_WIDTH = 8
"""Entries read in an ordinary step on a CPU; most steps accept fewer."""


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

    def forward(
        self,
        context: Tensor,
        frames: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Frames `[B, F, d]` → `[B, F, d]`; see `AttentionModule.frames`."""
        entries = self.attention_norm(torch.cat([context, frames], 1))
        qkv = self.qkv(entries).unflatten(2, (3, self.num_heads, -1))
        queries, keys = _rotate(qkv[:, :, :2], cos, sin).unbind(2)
        keys, values = remember(keys, qkv[:, :, 2])
        mixed = F.scaled_dot_product_attention(
            queries[:, context.shape[1] :].transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        frames = frames + self.out(mixed.transpose(1, 2).flatten(2))
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

    def frames(self, context: Tensor, starts: Tensor, rotation: Tensor, mask: Tensor, memory: Memory) -> Tensor:
        """The frames' last states: the one forward that training and decoding share.

        Args:
            context: `[B, W, d]` fused entries whose keys and values are not in the memory yet.
            starts: `[B, A, d]` fused entry of the pending token of each anchor (in decoding, A = 1).
            rotation: `[B, W + A·T, 2, D]` cosine and signed sine at the entries' positions, context first.
            mask: bool, broadcastable to `[B, 1, A·T, S']`: what each frame may attend to among what `memory` returns.
            memory: Takes a layer's new keys and values, returns those to attend to.

        Returns:
            `[B, A, T, d]`, before any output norm.
        """
        frames = (starts[:, :, None] + self.slots).flatten(1, 2)
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            frames = layer(context, frames, cos, sin, mask, partial(memory, index))
        return frames.view(frames.shape[0], starts.shape[1], self.num_frames, -1)

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Frames `[B, A, T, d]`; see `DraftModule.forward`."""
        batch, length, _ = embeddings.shape
        count, frames = anchors.shape[1], self.num_frames
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        context = self.fuse(embeddings, before)
        starts = context.gather(1, anchors[:, :, None].expand(-1, -1, context.shape[-1]))
        place = torch.arange(length, device=anchors.device)
        own = torch.arange(1, frames + 1, device=anchors.device)
        positions = torch.cat([place.expand(batch, -1), (anchors[:, :, None] + own).flatten(1)], 1)
        rotation = self.rotation(length + frames, hidden.device, context.dtype)[positions]
        sees_context = (place <= anchors[:, :, None]).repeat_interleave(frames, 1)
        anchor = torch.arange(count, device=anchors.device).repeat_interleave(frames)
        sees_frames = (anchor[:, None] == anchor).expand(batch, -1, -1)
        mask = torch.cat([sees_context, sees_frames], 2)[:, None]
        return self.frames(context, starts, rotation, mask, lambda _, keys, values: (keys, values))

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """A reader that keeps the keys and values of the fused context for every slot."""
        return _AttentionReader(self, base, fresh)


class _AttentionReader(FrameReader):
    """Reads each row's new tokens into a KV cache of the fused context, allocated once, and computes the frames."""

    def __init__(self, module: AttentionModule, base: BaseModel, fresh: int) -> None:
        self._module, self._base = module, base
        self._read: list[int] = []  # entries of each slot whose keys and values are in the cache
        # On a GPU entries are nearly free, and the host is a step behind.
        self._behind = devices.is_asynchronous(base.device)
        self._usual = max(_SMALL_WIDTH, _power_of_two(2 * fresh)) if self._behind else _SMALL_WIDTH
        self._width = self._usual

    def allocate(self, slots: int, length: int) -> None:
        module, device, dtype = self._module, self._base.device, self._base.dtype
        self._length = length + module.num_frames + 1
        shape = (slots * self._length, len(module.layers), 2, module.num_heads, module.width // module.num_heads)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._rotation = module.rotation(self._length, device, dtype)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(slots, device=device)[:, None]
        self._read = [0] * slots

    def admit(self, slot: int) -> None:
        self._read[slot] = 0

    def move(self, source: int, target: int) -> None:
        rows = self._cache.unflatten(0, (-1, self._length))
        rows[target, : self._read[source]] = rows[source, : self._read[source]]
        self._read[target] = self._read[source]

    def catch_up(self, context: DraftContext) -> None:
        known = context.host_lengths
        fresh = [length + context.ahead + 1 - self._read[slot] for slot, length in enumerate(known)]
        self._width = self._usual
        if len(known) == 1 and not self._behind:
            self._width = max(self._usual, _power_of_two(fresh[0]))
        # Rows that have just entered bring their whole prompts; these are read by themselves, not by padding the others
        # to them, and together where they are about as long.
        for width, group in groupby(range(len(fresh)), lambda slot: _power_of_two(fresh[slot])):
            slots = list(group)
            if width > self._width:
                together = max(_PROMPT_ENTRIES // width, 1)
                for first in slots[::together]:
                    self._states(context, first, min(first + together, slots[-1] + 1), width)
        self._read[: len(known)] = [length + 1 for length in known]

    def read(self, context: DraftContext) -> Tensor:
        return self._states(context, 0, context.tokens.shape[0], self._width)

    def _states(self, context: DraftContext, first: int, stop: int, width: int) -> Tensor:
        """Frame states `[b, T, d]` of slots `first..stop-1`, whose last `width` entries may be new.

        The window of entries that is read ends at the pending token and has one of a few fixed widths, so it may
        reach back: an entry read twice gets the same keys and values. The frames' own go behind the pending
        token's, where the next window overwrites them.
        """
        module, frames = self._module, self._module.num_frames
        assert context.hidden is not None
        lengths = context.lengths[first:stop, None]
        positions = (lengths + torch.arange(1 - width, frames + 1, device=lengths.device)).clamp_min(0)
        slots = self._slot[first:stop]
        places = (positions + slots * self._length).flatten()
        entries = positions[:, :width]
        before = ((entries - 1).clamp_min(0) + slots * context.hidden.shape[1]).flatten()
        hidden = context.hidden.flatten(0, 1).index_select(0, before).view(stop - first, width, -1)
        hidden = hidden.to(self._base.dtype) * (entries > 0)[..., None]
        fused = module.fuse(self._base.embed(context.tokens[first:stop].gather(1, entries)), hidden)

        bound = -(-(context.longest + 1 + frames) // _CONTEXT_BUCKET) * _CONTEXT_BUCKET
        bound = min(bound, self._length)
        mask = (self._place[:bound] <= lengths + frames)[:, None, None]
        rows = self._cache.unflatten(0, (-1, self._length))[first:stop, :bound]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._cache[:, layer].index_copy_(0, places, torch.stack([keys, values], 2).flatten(0, 1))
            return rows[:, :, layer, 0], rows[:, :, layer, 1]

        rotation = self._rotation.index_select(0, positions.flatten()).view(*positions.shape, 2, -1)
        return module.frames(fused, fused[:, -1:], rotation, mask, memory)[:, 0]


def _power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()

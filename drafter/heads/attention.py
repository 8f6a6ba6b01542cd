"""Attention draft module with rotary positions (arXiv 2104.09864), and its readers of the engine's slots."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.drafters.contract import DraftContext, Loan
from drafter.drafters.target import Target
from drafter.heads.frame_head import (
    ContextReader,
    DraftModule,
    FrameReader,
    all_hidden_before,
    rotary_rates,
    rotate,
    rotation_table,
)
from drafter.native.build import (
    BuildError,
    FrameLayersStruct,
    FrameLayerStruct,
    FramesStruct,
    LayerNormStruct,
    PackedWeights,
    UnsuitableError,
    library,
)
from drafter.target_model.attention import Prefix, parts_of, prefix_attention_agrees, prefix_attention_on
from drafter.target_model.prepacked import prepack

_log = logging.getLogger(__name__)

Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys `[B, S, H, D]`, new values) → all keys and values to attend to; see `FrameLayer.forward`."""


class FrameLayer(nn.Module):
    """Pre-norm attention from the frames to context and frames, then a gated MLP on the frames.

    Layers do not change the context; they only take keys and values from it.
    """

    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # LayerNorm instead of RMSNorm: on a CPU it is one kernel instead of five.
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def project(self, entries: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, S, H, D]` of entries `[B, S, d]`, rotated by `[B, S, 2, D]`."""
        qkv = self.qkv(self.attention_norm(entries)).unflatten(2, (3, self.num_heads, -1))
        queries, keys = rotate(qkv[:, :, :2], *rotation[:, :, None, None].unbind(4)).unbind(2)
        return queries, keys, qkv[:, :, 2]

    def forward(self, frames: Tensor, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | Prefix) -> Tensor:
        """Return the frames `[B, F, d]` after the layer, of frames `[B, F, d]` and their queries `[B, F, H, D]`.

        Keys and values are `[C, S', H, D]`; if `C` is not `B`, the frames belong to C texts, one after another. `seen`
        is a mask, broadcastable to `[C, 1, B·F/C, S']`; or the visible prefix of each text, of keys `[S · L, H, D]`.
        """
        if isinstance(seen, Prefix):
            queries = queries.reshape(len(seen.lengths), -1, *queries.shape[2:])
            mixed, _ = seen.read(queries, keys, values, queries.shape[-1] ** -0.5)
        else:
            queries = queries.reshape(keys.shape[0], -1, *queries.shape[2:])
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen
            ).transpose(1, 2)
        frames = frames + self.out(mixed.reshape(frames.shape))
        gate, up = self.gate_up(self.mlp_norm(frames)).chunk(2, -1)
        return frames + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class AttentionModule(DraftModule):
    """The attention draft module (Wen, Gui, Feng 2024, arXiv 2412.00061, section 3.1).

    Its T = `num_frames` frames attend to the whole text and to each other, or if `causal` to no later frame. Attention
    heads have an even width.
    """

    def __init__(
        self,
        width: int,
        num_frames: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        rope_theta: float,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.width, self.num_frames, self.num_heads, self.rope_theta = width, num_frames, num_heads, rope_theta
        self.embedding_norm = nn.LayerNorm(width)
        self.hidden_norm = nn.LayerNorm(width)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.5 * torch.randn(num_frames, width))
        self.layers = nn.ModuleList(FrameLayer(width, num_heads, intermediate_size) for _ in range(num_layers))

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Fuse embeddings `e(x_i)` `[..., d]` and hidden states `h_{i-1}` `[..., d]` to entries `[..., d]`."""
        return self.fusion(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden_before)], -1))  # type: ignore[no-any-return]

    def rates(self, device: torch.device) -> Tensor:
        return rotary_rates(self.rope_theta, self.width // self.num_heads, device)

    def frames(
        self, context: Tensor, starts: Tensor, count: int, rotation: Tensor, seen: Tensor | Prefix, memory: Memory
    ) -> Tensor:
        """Return the last states of the first F = `count` frames of each anchor, `[B, A, F, d]`, before any norm.

        Args:
            context: `[B, W, d]` fused entries that are not in the memory yet.
            starts: `[B, A, d]` fused entry of each anchor's pending token. In decoding B is 1 and the rows are its
                anchors.
            rotation: `[B, W + A·F, 2, D]` cosine and signed sine at the entries' positions, context first.
            seen: bool, broadcastable to `[C, 1, B·A·F/C, S']`: what each frame may attend to among what `memory`
                returns for C texts; or a `Prefix`, if all frames of a text see the same.
        """
        frames = (starts[:, :, None] + self.slots[:count]).flatten(1, 2)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, FrameLayer)
            queries, keys, values = layer.project(torch.cat([context, frames], 1), rotation)
            frames = layer(frames, queries[:, context.shape[1] :], *memory(index, keys, values), seen)
        return frames.view(frames.shape[0], starts.shape[1], count, -1)

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        batch, length, _ = embeddings.shape
        frames = count or self.num_frames
        context = self.fuse(embeddings, all_hidden_before(hidden))
        starts = context.gather(1, anchors[:, :, None].expand(-1, -1, context.shape[-1]))
        place = torch.arange(length, device=anchors.device)
        own = torch.arange(1, frames + 1, device=anchors.device)
        positions = torch.cat([place.expand(batch, -1), (anchors[:, :, None] + own).flatten(1)], 1)
        rotation = rotation_table(self.rates(hidden.device), length + frames, context.dtype)[positions]
        sees_context = (place <= anchors[:, :, None]).repeat_interleave(frames, 1)
        anchor = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(frames)
        sees_frames = anchor[:, None] == anchor
        if self.causal:
            number = own.repeat(anchors.shape[1])
            sees_frames = sees_frames & (number <= number[:, None])
        mask = torch.cat([sees_context, sees_frames.expand(batch, -1, -1)], 2)[:, None]
        return self.frames(context, starts, frames, rotation, mask, lambda _, keys, values: (keys, values))

    def reader(self, base: Target, fresh: int) -> FrameReader:
        if not devices.is_asynchronous(base.device) and base.dtype == torch.float32:
            try:
                return NativeAttentionReader(self, base, fresh)
            except (BuildError, UnsuitableError) as reason:
                _log.warning("the head drafts without the native library, which is slower: %s", reason)
        prepack(self)
        return AttentionReader(self, base, fresh)


class AttentionReader(ContextReader, FrameReader):
    """Computes the frames behind a KV cache of the fused context."""

    def __init__(self, module: AttentionModule, base: Target, fresh: int) -> None:
        heads, rates = module.num_heads, module.rates(base.device)
        super().__init__(base, fresh, rates, layers=len(module.layers), heads=heads, behind=module.num_frames)
        self._module = module
        attend = prefix_attention_on(base.device, base.dtype)
        # Where all frames of a text see the same of it, they need no mask if something reads to its end.
        proved = (
            attend is not None
            and not module.causal
            and prefix_attention_agrees(attend, heads, 2 * len(rates), base.device, base.dtype)
        )
        self._attend, self.bounded = (attend, False) if proved else (None, True)

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        module, rows = self._module, context.tokens.shape[0]
        frames = count or module.num_frames
        slots, back, ends = self._recent(rows)
        positions, fused = self._fused(context, slots, back)
        ahead = context.lengths[:, None] + torch.arange(1, frames + 1, device=positions.device)
        # The frames' own keys and values go behind the pending token's, where later entries overwrite them.
        places = torch.cat(
            [positions + slots * self._length, (ahead + self._slot[:rows, None] * self._length).flatten()]
        )
        seen: Tensor | Prefix
        if self._attend is not None:
            parts = parts_of(rows, module.num_heads, frames, self._length)
            lengths, texts = context.lengths + (frames + 1), self._cache
            seen = Prefix(lengths, self._length, parts, self._attend, frames, some=True)
        else:
            texts = self._texts(rows, context.longest + 1 + frames)
            last = ahead if module.causal else ahead[:, -1:]
            seen = (self._place[: texts.shape[3]] <= last[:, :, None])[:, None]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._store(places, layer, keys, values)
            return texts[layer, 0], texts[layer, 1]

        rotation = self._rotation[torch.cat([positions, ahead.flatten()])]
        return module.frames(fused[None], fused[None, ends], frames, rotation[None], seen, memory)[0]

    def _read(self, context: DraftContext, slots: Tensor, back: Tensor) -> None:
        positions, fused = self._fused(context, slots, back)
        places, rotation = positions + slots * self._length, self._rotation[positions][None]
        for index, layer in enumerate(self._module.layers):
            assert isinstance(layer, FrameLayer)
            self._store(places, index, *layer.project(fused[None], rotation)[1:])

    def _fused(self, context: DraftContext, slots: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions `[E]` of entries and the fused entries `[E, d]`."""
        positions, embeddings, hidden = self._inputs(context, slots, back)
        return positions, self._module.fuse(embeddings, hidden)


class NativeAttentionReader(AttentionReader):
    """An `AttentionReader` for frozen weights in fp32 on a CPU: one call of the native library per step.

    Raises `BuildError` if the library cannot be compiled here, and `UnsuitableError` if the weights are on another
    device, the frames are causal, or the library lacks the head size.
    """

    def __init__(self, module: AttentionModule, base: Target, fresh: int) -> None:
        super().__init__(module, base, fresh)
        if module.causal:
            raise UnsuitableError("the library has no frames that leave out later ones")
        size = module.width // module.num_heads
        if not library().drafter_takes_heads_of(size):
            raise UnsuitableError(f"the library has no attention for heads of {size} numbers")
        self._weights = weights = PackedWeights()
        layers = (FrameLayerStruct * len(module.layers))()
        for struct, layer in zip(layers, module.layers, strict=True):
            assert isinstance(layer, FrameLayer)
            struct.attention_norm, struct.mlp_norm = self._norm(layer.attention_norm), self._norm(layer.mlp_norm)
            struct.qkv, struct.output = weights.matrix(layer.qkv.weight), weights.matrix(layer.out.weight)
            struct.gate_up = weights.gated(layer.gate_up.weight)
            struct.down = weights.after_gate(layer.down.weight)
        self._struct = FrameLayersStruct(
            layers=layers,
            embedding_norm=self._norm(module.embedding_norm),
            hidden_norm=self._norm(module.hidden_norm),
            fusion=weights.matrix(module.fusion.weight),
            slots=weights.address(module.slots),
            layer_count=len(layers),
            width=module.width,
            heads=module.num_heads,
            head_size=size,
            intermediate=layers[0].down.inputs,
            scale=size**-0.5,
        )

    def open(self, loan: Loan) -> None:
        super().open(loan)
        half = self._rotation.shape[2] // 2
        self._struct.cosines = self._weights.address(self._rotation[:, 0, :half])
        self._struct.sines = self._weights.address(self._rotation[:, 1, half:])

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        frames = count or self._module.num_frames
        return self._run(context, *self._recent(len(context.tokens)), frames)

    def _read(self, context: DraftContext, slots: Tensor, back: Tensor) -> None:
        self._run(context, slots, back, slots[:0], 0)

    def _run(self, context: DraftContext, slots: Tensor, back: Tensor, ends: Tensor, frames: int) -> Tensor:
        """Read entries; return frames `[B, F, d]` after the entries `ends` `[B]`."""
        hidden = context.hidden
        assert hidden is not None
        assert hidden.dtype == torch.float32
        assert hidden.stride()[1:] == (self._module.width, 1)
        # On a CPU the host knows all lengths, and numpy takes less time than PyTorch to index with a few numbers.
        slot = slots.numpy()
        positions = (np.array(context.host_lengths)[slot] - back.numpy()).clip(0)
        embeddings = self._base.embed(torch.from_numpy(context.tokens.numpy()[slot, positions])).float().contiguous()
        states = torch.empty(len(ends), frames, self._module.width, dtype=torch.float32)
        asked = FramesStruct(
            cache=self._cache.data_ptr(),
            slots=len(self._slot),
            length=self._length,
            embeddings=embeddings.data_ptr(),
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride(0),
            slot=slot.ctypes.data,
            position=positions.ctypes.data,
            entries=len(slot),
            ends=ends.data_ptr(),
            rows=len(ends),
            frames=frames,
            states=states.data_ptr(),
            threads=torch.get_num_threads(),
        )
        library().drafter_frames(ctypes.byref(self._struct), ctypes.byref(asked))
        return states

    def _norm(self, norm: nn.LayerNorm) -> LayerNormStruct:
        return LayerNormStruct(self._weights.address(norm.weight), self._weights.address(norm.bias))

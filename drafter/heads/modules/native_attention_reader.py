"""The attention draft module in decoding on a CPU: its layers by our own C++ code, one call a step."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.attention_layers import AttentionLayers, FrameLayer
from drafter.heads.modules.attention_reader import AttentionReader
from drafter.heads.modules.context_reader import Entries
from drafter.native.library import PackedWeights, UnsuitableError, library
from drafter.native.structures import FrameLayersStruct, FrameLayerStruct, FramesStruct, LayerNormStruct


class NativeAttentionReader(AttentionReader):
    """An `AttentionReader` for weights that no longer change, in fp32 on a CPU.

    Args:
        module: The layers.
        base: Lends its embedding.
        fresh: Tokens that an ordinary step adds to a sequence at most.

    Raises:
        BuildError: The library cannot be compiled here.
        UnsuitableError: Its weights are elsewhere, its frames causal, or its heads of a size that the library does not
            have.
    """

    def __init__(self, module: AttentionLayers, base: BaseModel, fresh: int) -> None:
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

    def open(self, slots: int, length: int) -> None:
        """Allocate the cache."""
        super().open(slots, length)
        half = self._rotation.shape[2] // 2
        self._struct.cosines = self._weights.address(self._rotation[:, 0, :half])
        self._struct.sines = self._weights.address(self._rotation[:, 1, half:])

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Read the new entries and return the first `count` frames, or all, `[B, F, d]`."""
        frames = count or self._module.num_frames
        entries, ends = self._recent(len(context.tokens))
        return self._run(context, entries, ends, frames)

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        self._run(context, entries, entries.slots[:0], 0)

    def _run(self, context: DraftContext, entries: Entries, ends: Tensor, frames: int) -> Tensor:
        """Read entries, and return frames `[B, F, d]` after those of `ends` `[B]`."""
        hidden = context.hidden
        assert hidden is not None
        assert hidden.dtype == torch.float32
        assert hidden.stride()[1:] == (self._module.width, 1)
        # On a CPU the host knows all lengths, and numpy takes less time than PyTorch to index with a few numbers.
        slots = entries.slots.numpy()
        positions = (np.array(context.host_lengths)[slots] - entries.back.numpy()).clip(0)
        embeddings = self._base.embed(torch.from_numpy(context.tokens.numpy()[slots, positions])).float().contiguous()
        states = torch.empty(len(ends), frames, self._module.width, dtype=torch.float32)
        asked = FramesStruct(
            cache=self._cache.data_ptr(),
            slots=len(self._cached),
            length=self._length,
            embeddings=embeddings.data_ptr(),
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride(0),
            slot=slots.ctypes.data,
            position=positions.ctypes.data,
            entries=len(slots),
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

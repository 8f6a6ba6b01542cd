"""The attention draft module (Wen, Gui, Feng 2024, arXiv 2412.00061, section 3.1)."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import prepack
from drafter.heads.modules.attention_layers import AttentionLayers
from drafter.heads.modules.attention_reader import AttentionReader
from drafter.heads.modules.contract import DraftModule, FrameReader
from drafter.heads.modules.native_attention_reader import NativeAttentionReader
from drafter.native.build import BuildError
from drafter.native.library import UnsuitableError

_log = logging.getLogger(__name__)


class AttentionModule(AttentionLayers, DraftModule):
    """Frames that attend to the whole text and to each other; see `AttentionLayers`."""

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, F, d]`; see `DraftModule.forward`."""
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
        sees_frames = anchor[:, None] == anchor
        if self.causal:
            number = own.repeat(anchors.shape[1])
            sees_frames = sees_frames & (number <= number[:, None])
        mask = torch.cat([sees_context, sees_frames.expand(batch, -1, -1)], 2)[:, None]
        return self.frames(context, starts, frames, rotation, mask, lambda _, keys, values: (keys, values))

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader with a KV cache of every slot's fused context."""
        if not devices.is_asynchronous(base.device) and base.dtype == torch.float32:
            try:
                return NativeAttentionReader(self, base, fresh)
            except (BuildError, UnsuitableError) as reason:
                _log.warning("the head drafts without the native library, which is slower: %s", reason)
        prepack(self)
        return AttentionReader(self, base, fresh)

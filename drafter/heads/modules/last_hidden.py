"""A draft module without parameters: the base's last hidden state is the only frame."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.contract import DraftModule, FrameReader, hidden_before, newest_hidden


class LastHidden(DraftModule):
    """One frame: the hidden state before the pending token."""

    num_frames = 1

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, 1, d]`; see `DraftModule.forward`."""
        return hidden_before(hidden, anchors)[:, :, None]

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader without memory."""
        return _LastHiddenReader(base.dtype)


class _LastHiddenReader(FrameReader):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return newest_hidden(context)[:, None].to(self._dtype)

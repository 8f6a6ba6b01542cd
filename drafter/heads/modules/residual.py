"""One residual block per frame on the last hidden state: Medusa's draft module (Cai et al. 2024, arXiv 2401.10774).

The frames see neither the pending token nor the text before it. The ablation of Wen et al. (arXiv 2412.00061) calls
this the linear head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import prepack
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.contract import DraftModule, FrameReader, hidden_before, newest_hidden


class ResidualBlocks(DraftModule):
    """`frame_j = h + SiLU(W_j h)`. `W_j` starts at zero, so every frame starts as the base's own state.

    Args:
        width: d.
        num_frames: T.
    """

    def __init__(self, width: int, num_frames: int) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_frames))
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, F, d]`; see `DraftModule.forward`."""
        return self.frames(hidden_before(hidden, anchors), count)

    def frames(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return the first `count` frames, or all, `[..., F, d]` of hidden states `[..., d]`."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks[:count]], -2)

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader without memory."""
        prepack(self)
        return _ResidualReader(self, base.dtype)


class _ResidualReader(FrameReader):
    def __init__(self, module: ResidualBlocks, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return self._module.frames(newest_hidden(context).to(self._dtype), count)

"""What a draft head trains on in one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftBatch:
    """What a head trains on in one step.

    Args:
        tokens: `[B, L]` int64, padded on the right.
        anchors: `[B, A]` positions of pending tokens.
        targets: `[B, A, U]` the tokens after each anchor; 0 past the text's end.
        lengths: `[B, A]` valid targets; 0 for an anchor that only fills the row.
        hidden: `[B, L, d]` the base's last hidden states, where they are known; otherwise the training step asks the
            base for them.
    """

    tokens: Tensor
    anchors: Tensor
    targets: Tensor
    lengths: Tensor
    hidden: Tensor | None = None

    def to(self, device: torch.device) -> DraftBatch:
        """The same on `device`."""
        tensors = (self.tokens, self.anchors, self.targets, self.lengths, self.hidden)
        return DraftBatch(*(tensor if tensor is None else tensor.to(device) for tensor in tensors))  # type: ignore[arg-type]

"""A batch of anchors and targets, on which a draft head trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftBatch:
    """Texts, the positions in them where the head drafts, and the tokens that follow there.

    Args:
        tokens: `[B, L]` int64 texts, padded on the right.
        anchors: `[B, A]` positions of the pending tokens.
        targets: `[B, A, U]` the tokens after each anchor; 0 past the end of the text.
        lengths: `[B, A]` number of valid targets; 0 for an anchor that is padding.
        hidden: `[B, L, K · d]` the base's hidden states that the training step reads (`training_layers`) if they were
            stored; None lets it compute them.
    """

    tokens: Tensor
    anchors: Tensor
    targets: Tensor
    lengths: Tensor
    hidden: Tensor | None = None

    def to(self, device: torch.device) -> DraftBatch:
        """Return the batch on `device`."""
        tensors = (self.tokens, self.anchors, self.targets, self.lengths, self.hidden)
        return DraftBatch(*(tensor if tensor is None else tensor.to(device) for tensor in tensors))  # type: ignore[arg-type]

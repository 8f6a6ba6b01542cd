"""Training batches, labels and loss terms that all heads share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftBatch:
    """Texts, anchors in them where the head drafts, and the tokens that follow.

    Args:
        tokens: `[B, L]` int64 texts, padded on the right.
        anchors: `[B, A]` positions of the pending tokens.
        targets: `[B, A, U]` the tokens after each anchor; 0 past the end of the text.
        lengths: `[B, A]` number of valid targets; 0 for a padding anchor.
        hidden: `[B, L, K · d]` stored hidden states of `training_layers`; None lets the training step compute them.
    """

    tokens: Tensor
    anchors: Tensor
    targets: Tensor
    lengths: Tensor
    hidden: Tensor | None = None

    def to(self, device: torch.device) -> DraftBatch:
        tensors = (self.tokens, self.anchors, self.targets, self.lengths, self.hidden)
        return DraftBatch(*(tensor if tensor is None else tensor.to(device) for tensor in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LossSum:
    """Sum of weighted terms in nats, and of their weights; data-parallel workers divide by all workers' weight."""

    total: Tensor
    weight: Tensor

    def mean(self) -> Tensor:
        """Return the weighted mean in nats; 0 without terms."""
        return self.total / self.weight.clamp_min(1e-9)


@dataclass(frozen=True)
class Labels:
    """Labels `[..., K]` of each target: int64 tokens, and float32 probabilities that sum to 1 over K."""

    tokens: Tensor
    probs: Tensor

    def __getitem__(self, index: Tensor) -> Labels:
        return Labels(self.tokens[index], self.probs[index])


def hard_labels(targets: Tensor) -> Labels:
    """Return labels with K = 1 and probability 1 of `targets` `[...]`."""
    tokens = targets[..., None]
    return Labels(tokens, torch.ones_like(tokens, dtype=torch.float32))


def cross_entropy(log_probs: Tensor, labels: Labels, lengths: Tensor, decay: float) -> LossSum:
    """Return `−Σ_u decay^u Σ_k q_uk log p_u(v_uk)`, for heads whose `u`-th distribution predicts the `u`-th token.

    Args:
        log_probs: `[N, U, K]` log-probabilities of the labels.
        labels: `[N, U, K]`. A position whose labels all have probability 0 does not count.
        lengths: `[N]` number of valid positions.
        decay: Weight of a position relative to the one before it.
    """
    place = torch.arange(log_probs.shape[1], device=lengths.device)
    counted = (place < lengths[:, None]) & (labels.probs > 0).any(2)
    weights = counted * decay ** place.to(log_probs.dtype)
    return LossSum(-(weights * (labels.probs * log_probs).sum(2)).sum(), weights.sum())

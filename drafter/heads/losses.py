"""What every head's loss is made of: labels with weights, sums with weights, depth-weighted cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A sum of weighted terms; data-parallel workers divide by the weight of all.

    Args:
        total: Scalar, in nats, differentiable.
        weight: Scalar, the sum of the weights of the terms that counted.
    """

    total: Tensor
    weight: Tensor

    def mean(self) -> Tensor:
        """Weighted mean in nats; 0 where nothing counted."""
        return self.total / self.weight.clamp_min(1e-9)


@dataclass(frozen=True)
class Labels:
    """What a head should say at each place: one token for sure, or several as probable as the base finds them.

    Args:
        tokens: `[..., K]` int64.
        probs: `[..., K]` float32, of sum 1.
    """

    tokens: Tensor
    probs: Tensor

    def __getitem__(self, index: Tensor) -> Labels:
        return Labels(self.tokens[index], self.probs[index])


def hard_labels(targets: Tensor) -> Labels:
    """`targets` `[...]` for sure: K = 1."""
    tokens = targets[..., None]
    return Labels(tokens, torch.ones_like(tokens, dtype=torch.float32))


def cross_entropy(log_probs: Tensor, labels: Labels, lengths: Tensor, decay: float) -> LossSum:
    """`−Σ_u decay^u Σ_k q_uk log p_u(v_uk)`, for heads whose `u`-th distribution is of the `u`-th token.

    Args:
        log_probs: `[N, U, K]` of the labels.
        labels: `[N, U, K]`.
        lengths: `[N]` valid places.
        decay: Weight of a place, relative to the one before.
    """
    place = torch.arange(log_probs.shape[1], device=lengths.device)
    weights = (place < lengths[:, None]) * decay ** place.to(log_probs.dtype)
    return LossSum(-(weights * (labels.probs * log_probs).sum(2)).sum(), weights.sum())

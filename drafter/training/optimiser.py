"""One optimiser step: forward, backward, clipping and AdamW, on one device. Whoever shards models brings another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drafter.errors import TrainingError
from drafter.heads.contract import DraftHead
from drafter.heads.draft_batch import DraftBatch
from drafter.training.settings import TrainingSettings
from drafter.training.training_step import TrainingStep


@dataclass(frozen=True)
class Update:
    """What an optimiser step did.

    Args:
        loss: Weighted mean over all workers, mean over micro-batches, in nats.
        gradient_norm: Before clipping.
        learning_rate: Of this step.
    """

    loss: float
    gradient_norm: float
    learning_rate: float


class Optimiser(Protocol):
    """What takes a step."""

    def update(self, parts: Sequence[DraftBatch]) -> Update:
        """Forward, backward, clip and step.

        Args:
            parts: This worker's share of each micro-batch of the step; one without gradient accumulation.

        Raises:
            TrainingError: The loss or its gradient is not finite. Nothing has changed.
        """


def adamw(head: DraftHead, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW over the head's parameters; its learning rate is set before each step."""
    return torch.optim.AdamW(
        head.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )


def check_finite(step: int, loss: float, gradient_norm: float) -> None:
    """Raise `TrainingError` if a number of step `step` (from 1) is not finite."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise TrainingError(
            f"step {step}: the loss is {loss:g} and its gradient's norm {gradient_norm:g}; "
            "lower the learning rate, or train in fp32"
        )


class TorchOptimiser:
    """AdamW in this process.

    Args:
        step_of: Base and head, on one device.
        settings: Rates and limits.
    """

    def __init__(self, step_of: TrainingStep, settings: TrainingSettings) -> None:
        self._step_of, self._settings = step_of, settings
        self._adamw = adamw(step_of.head, settings)
        self.steps = 0

    def update(self, parts: Sequence[DraftBatch]) -> Update:
        """Take a step; see `Optimiser.update`."""
        rate = self._settings.learning_rate_at(self.steps)
        loss = 0.0
        for part in parts:
            total, weight = self._step_of(part)
            mean = total / weight.clamp_min(1e-9) / len(parts)
            mean.backward()
            loss += mean.item()
        norm = torch.nn.utils.clip_grad_norm_(self._step_of.head.parameters(), self._settings.clip).item()
        try:
            check_finite(self.steps + 1, loss, norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        finally:
            self._adamw.zero_grad()
        self.steps += 1
        return Update(loss, norm, rate)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from."""
        return {"adamw": self._adamw.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of `state`."""
        self._adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]

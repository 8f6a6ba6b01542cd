"""Training of a draft head: forward, optimiser step on one device, and loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafter.errors import TrainingError
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, hard_labels
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.settings import TrainingSettings
from drafter.training.targets import base_hidden_states, teacher_labels


class TrainingStep(nn.Module):
    """Computes a head's loss on a batch. Target model and head are one module, so both can be sharded together.

    The frozen target model computes hidden states that the batch lacks.
    """

    def __init__(self, base: BaseModel, head: DraftHead, settings: TrainingSettings) -> None:
        super().__init__()
        self.base_model: nn.Module = base.model
        self.head = head
        self._base, self._settings = base, settings

    def forward(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Return the loss's total and weight, scalars (see `LossSum`)."""
        settings, base, head = self._settings, self._base, self.head
        layers = training_layers(head, settings)
        with torch.autocast(base.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            if batch.hidden is None:
                hidden = base_hidden_states(base, batch.tokens, layers)
            else:
                hidden = batch.hidden.to(base.dtype)
            parts = hidden.chunk(len(layers), -1)
            labels = hard_labels(batch.targets)
            if settings.teacher:
                last = parts[layers.index(LM_HEAD_INPUT)]
                labels = teacher_labels(base, head, batch, last, settings.teacher, settings.teacher_temperature)
            if layers != head.hidden_layers:
                hidden = torch.cat(parts[: len(head.hidden_layers)], -1)
            loss = head(base, batch, hidden, labels)
        return loss.total, loss.weight


def training_layers(head: DraftHead, settings: TrainingSettings) -> tuple[int, ...]:
    """Return the hidden layers that training reads: the head's, and with a teacher the LM head's input."""
    layers = head.hidden_layers
    return (*layers, LM_HEAD_INPUT) if settings.teacher and LM_HEAD_INPUT not in layers else layers


@dataclass(frozen=True)
class Update:
    """Loss in nats (mean over workers and micro-batches), gradient norm before clipping, learning rate of the step."""

    loss: float
    gradient_norm: float
    learning_rate: float


class Optimiser(Protocol):
    """Applies optimiser steps to the head's parameters. Sharded models need their own implementation."""

    def update(self, parts: Sequence[DraftBatch]) -> Update:
        """Apply one step to this worker's share of each of its micro-batches: forward, backward, clip, update.

        If the loss or its gradient is not finite, raise `TrainingError` and change nothing.
        """


def adamw(head: DraftHead, settings: TrainingSettings) -> torch.optim.AdamW:
    """Return AdamW over the head's parameters, with a learning rate that is set before each step."""
    return torch.optim.AdamW(
        head.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )


def check_finite(step: int, loss: float, gradient_norm: float) -> None:
    """Raise `TrainingError` if the loss or the gradient norm of step `step` (from 1) is not finite."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise TrainingError(
            f"step {step}: the loss is {loss:g} and its gradient's norm {gradient_norm:g}; "
            "lower the learning rate, or train in fp32"
        )


class TorchOptimiser:
    """`Optimiser` on one device."""

    def __init__(self, step_of: TrainingStep, settings: TrainingSettings) -> None:
        self._step_of, self._settings = step_of, settings
        self._adamw = adamw(step_of.head, settings)
        self.steps = 0

    def update(self, parts: Sequence[DraftBatch]) -> Update:
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
        return {"adamw": self._adamw.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]


@dataclass(frozen=True)
class StepDone:
    """A completed step, numbered from 1; `beta` is held-out β by number of draft tokens, if an evaluation followed."""

    step: int
    update: Update
    beta: dict[int, float] | None


def train(
    optimiser: Optimiser,
    steps: Iterable[Sequence[DraftBatch]],
    settings: TrainingSettings,
    evaluate: Callable[[], dict[int, float]],
    done: int = 0,
) -> Iterator[StepDone]:
    """Train from step `done + 1` to the last step; raise `TrainingError` if a loss is not finite.

    `steps` are this worker's micro-batches of each step, from step `done + 1` on; `evaluate` measures held-out β by
    number of draft tokens.
    """
    for step, parts in zip(range(done + 1, settings.steps + 1), steps, strict=False):
        update = optimiser.update(parts)
        due = step % settings.evaluate_every == 0 or step == settings.steps
        yield StepDone(step, update, evaluate() if due else None)

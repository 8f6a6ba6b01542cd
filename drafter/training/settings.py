"""Settings of a training run. Without torch, for job configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

NODE_COUNTS = (8, 16, 32, 64)  # draft tokens at which held-out β is measured


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run.

    Args:
        steps: Number of optimiser steps.
        texts_per_step: Number of texts of a step, over all workers.
        anchors_per_text: Number of positions of a text where the head drafts.
        learning_rate: Highest learning rate.
        warmup_steps: Steps of linear warm-up; a cosine follows.
        final_learning_rate: Last learning rate, relative to the highest.
        weight_decay: AdamW's weight decay.
        clip: Largest norm of the gradient.
        teacher: Number of labels per target, the target model's most probable tokens; with 0 the label is the text
            itself.
        teacher_temperature: Temperature of the labels' weights.
        precision: With `bf16`, matrix products are in bf16; parameters and optimiser are in fp32 all the same.
        evaluate_every: Steps between two evaluations.
        chosen_by: Number of draft tokens of the held-out β that chooses the checkpoint.
        seed: Seed of initial weights, order and anchors.
    """

    steps: int = 1_200
    texts_per_step: int = 12
    anchors_per_text: int = 48
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    final_learning_rate: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    teacher: int = 0
    teacher_temperature: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    evaluate_every: int = 200
    chosen_by: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chosen_by not in NODE_COUNTS:
            raise ValueError(f"chosen_by must be one of {', '.join(map(str, NODE_COUNTS))}, not {self.chosen_by}")
        for name in ("steps", "texts_per_step", "anchors_per_text", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup_steps", "final_learning_rate", "weight_decay", "teacher"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0, not {value}")
        for name in ("learning_rate", "clip", "teacher_temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be more than 0, not {value}")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0): linear warm-up, then cosine decay."""
        rise = min((step + 1) / max(self.warmup_steps, 1), 1.0)
        fall = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1.0)))
        return self.learning_rate * rise * (self.final_learning_rate + (1 - self.final_learning_rate) * fall)

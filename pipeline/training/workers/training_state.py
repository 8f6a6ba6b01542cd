"""All that a training step changes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside the number of steps."""


@dataclass(frozen=True)
class TrainingState:
    """A head and its optimiser after some steps, gathered from all workers.

    Args:
        steps: Steps taken.
        weights: Of the head, by name, float32, on the CPU.
        moments: AdamW's, by moment and name.
    """

    steps: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]

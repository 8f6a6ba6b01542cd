"""Everything that a training step changes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments of a parameter."""


@dataclass(frozen=True)
class TrainingState:
    """A head and its optimiser after some steps, gathered from all workers.

    Args:
        steps: Number of steps taken.
        weights: The head's weights by name, in float32, and its draft vocabulary, on the CPU.
        moments: AdamW's moments by name of the moment and name of the parameter.
    """

    steps: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]

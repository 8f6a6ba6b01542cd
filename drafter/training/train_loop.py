"""The training loop: optimiser steps, and β on held-out texts every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drafter.heads.draft_batch import DraftBatch
from drafter.training.optimiser import Optimiser, Update
from drafter.training.settings import TrainingSettings


@dataclass(frozen=True)
class StepDone:
    """A step that was taken.

    Args:
        step: Its number, from 1.
        update: Result of the optimiser.
        beta: Held-out β by number of draft nodes if an evaluation followed the step.
    """

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
    """Train from step `done + 1` to the last step. The caller logs and saves between the steps.

    Args:
        optimiser: An optimiser that has taken `done` steps.
        steps: This worker's micro-batches of each step, from step `done + 1` on.
        settings: Give the number of steps and the steps between evaluations.
        evaluate: Measures held-out β by number of draft nodes.
        done: Steps that were taken before.

    Raises:
        TrainingError: The loss is not finite.
    """
    for step, parts in zip(range(done + 1, settings.steps + 1), steps, strict=False):
        update = optimiser.update(parts)
        due = step % settings.evaluate_every == 0 or step == settings.steps
        yield StepDone(step, update, evaluate() if due else None)

"""The training loop: step after step, with β on held-out text every so often."""

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
        update: What the optimiser did.
        beta: Held-out β by draft nodes, where the step ended with an evaluation.
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
    """Train from step `done + 1` to the last; the caller logs, saves and checkpoints between steps.

    Args:
        optimiser: Has taken `done` steps.
        steps: This worker's micro-batches of each step, from step `done + 1` on.
        settings: Says how many steps, and how often β is measured.
        evaluate: Measures held-out β by draft nodes.
        done: Steps taken before.

    Raises:
        TrainingError: The loss is not finite any more.
    """
    for step, parts in zip(range(done + 1, settings.steps + 1), steps, strict=False):
        update = optimiser.update(parts)
        due = step % settings.evaluate_every == 0 or step == settings.steps
        yield StepDone(step, update, evaluate() if due else None)

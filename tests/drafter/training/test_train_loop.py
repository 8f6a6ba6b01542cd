from __future__ import annotations

from collections.abc import Iterator, Sequence

from drafter.heads.losses import DraftBatch
from drafter.training.loop import Update, train
from drafter.training.settings import TrainingSettings
from drafter.training.targets import draft_batch
from tests.support.heads import random_texts

PART = draft_batch(random_texts(1), 4, 4)


class Counting:
    """An optimiser that only counts."""

    def __init__(self) -> None:
        self.updates = 0

    def update(self, parts: Sequence[DraftBatch]) -> Update:
        self.updates += 1
        return Update(float(self.updates), 1.0, 0.1)


def endless() -> Iterator[list[DraftBatch]]:
    while True:
        yield [PART]


def test_beta_is_measured_every_few_steps_and_at_the_end() -> None:
    optimiser = Counting()
    done = list(train(optimiser, endless(), TrainingSettings(steps=5, evaluate_every=2), lambda: {8: 2.0}))
    assert [one.step for one in done] == [1, 2, 3, 4, 5]
    assert [one.beta for one in done] == [None, {8: 2.0}, None, {8: 2.0}, {8: 2.0}]
    assert [one.update.loss for one in done] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_steps_that_were_taken_are_not_taken_again() -> None:
    optimiser = Counting()
    settings = TrainingSettings(steps=5, evaluate_every=2)
    assert [one.step for one in train(optimiser, endless(), settings, dict, done=3)] == [4, 5]
    assert list(train(optimiser, endless(), settings, dict, done=5)) == []
    assert optimiser.updates == 2


def test_evaluation_sees_the_head_after_the_step() -> None:
    optimiser = Counting()
    done = train(optimiser, endless(), TrainingSettings(steps=2, evaluate_every=1), lambda: {8: optimiser.updates})
    assert [one.beta for one in done] == [{8: 1}, {8: 2}]

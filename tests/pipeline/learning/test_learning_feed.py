"""An engine's thread beside its learner: rows go one batch at a time, versions come, and who is gone costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import ray
import torch
from torch import Tensor

from drafter.errors import LoadError
from drafter.llm import SpeculativeLM
from drafter.methods.learning.drafter import ChangingHead
from drafter.methods.learning.rows import SampleTap
from drafter.parts.learning import EndedRow
from pipeline.learning.feed import Answer, LearningFeed
from tests.support.waiting import wait_until


class Teacher:
    """A learner that answers as it is told; an actor."""

    def __init__(self) -> None:
        self._answer = Answer(wants_rows=True)
        self._rows: list[str] = []

    def publish(self, number: int, weights: Mapping[str, Tensor]) -> None:
        self._answer = Answer(True, number, (ray.put(weights),))

    def rest(self) -> None:
        self._answer = Answer(wants_rows=False)

    def exchange(self, rows: list[Any]) -> Answer:
        for batch in rows:
            self._rows += [one.request_id for one in ray.get(batch)]
        return self._answer

    def rows(self) -> list[str]:
        return self._rows


class Engine(ChangingHead):
    """What a feed sees of an engine; it refuses the version 13, and has no memory for the version 15."""

    def __init__(self) -> None:
        self.samples = SampleTap()
        self.refused = 0
        self.offered: list[tuple[int, list[float]]] = []
        self.engine = SimpleNamespace(drafter=self)

    def offer(self, number: int, weights: Mapping[str, Tensor]) -> None:
        if number == 13:
            raise LoadError("no such shape")
        if number == 15:
            self.refused += 1
            raise MemoryError("no room for it")
        self.offered.append((number, weights["w"].tolist()))

    def end_row(self, name: str) -> bool:
        """A row ends; returns whether it was kept."""
        row = EndedRow(name, [1, 2], [3, 4])
        if wanted := self.samples.wants(row, 0):
            self.samples.put(row, None, None)
        return wanted


@pytest.mark.usefixtures("local_ray")
def test_rows_go_and_versions_come(capfd: pytest.CaptureFixture[str]) -> None:
    engine, teacher = Engine(), ray.remote(num_cpus=0)(Teacher).remote()
    feed = LearningFeed(cast(SpeculativeLM, engine), lambda: teacher)
    engine.end_row("a")
    engine.end_row("b")
    feed.exchange()
    assert sorted(ray.get(teacher.rows.remote())) == ["a", "b"]
    assert engine.offered == []

    ray.get(teacher.publish.remote(2, {"w": torch.tensor([1.0, 2.0])}))
    feed.exchange()
    feed.exchange()
    assert engine.offered == [(2, [1.0, 2.0])]  # once

    ray.get(teacher.publish.remote(13, {"w": torch.zeros(2)}))
    feed.exchange()
    assert "version 13 is not taken: no such shape" in capfd.readouterr().err

    ray.get(teacher.rest.remote())
    feed.exchange()
    assert not engine.end_row("c")  # nothing is copied while nobody wants it
    ray.get(teacher.publish.remote(14, {"w": torch.ones(2)}))
    feed.exchange()
    assert engine.end_row("d")

    ray.get(teacher.publish.remote(15, {"w": torch.ones(2)}))
    feed.exchange()
    feed.exchange()
    assert "version 15 is not taken: no room for it" in capfd.readouterr().err
    assert engine.refused == 1  # it is not tried again
    ray.get(teacher.publish.remote(16, {"w": torch.ones(2)}))
    feed.exchange()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.samples, "take", Mock(side_effect=RuntimeError("no rows")))
        feed.exchange()
    assert "nothing is exchanged with the learner for now: no rows" in capfd.readouterr().err
    assert not engine.end_row("f")

    def goes_on() -> bool:
        feed.exchange()
        return engine.end_row("g")

    wait_until(goes_on, "the next search for the learner")

    ray.kill(teacher)

    def is_missed() -> bool:  # Ray tells a little later
        feed.exchange()
        return not engine.end_row("e")

    wait_until(is_missed, "the end of the learner")
    assert [number for number, _ in engine.offered] == [2, 14, 16]


@pytest.mark.usefixtures("local_ray")
def test_no_other_rows_leave_before_the_learner_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learning.feed._ANSWER_SECONDS", 0.05)

    class Slow:
        """A learner that has not answered yet."""

        calls = 0

        @property
        def exchange(self) -> SimpleNamespace:
            def remote(*_: Any) -> Any:
                self.calls += 1
                return never.wait.remote()

            return SimpleNamespace(remote=remote)

    class Never:
        def wait(self) -> None:
            threading.Event().wait()

    never = ray.remote(num_cpus=0)(Never).remote()
    engine, slow = Engine(), Slow()
    feed = LearningFeed(cast(SpeculativeLM, engine), lambda: slow)
    for name in "abc":
        engine.end_row(name)
        feed.exchange()
    assert slow.calls == 1
    assert [one.request_id for one in engine.samples.take(1 << 20)] == ["c", "b"]
    ray.kill(never)


@pytest.mark.usefixtures("local_ray")
def test_a_learner_is_looked_for_until_it_is_there_and_again_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learning.feed._FIND_SECONDS", 0.0)
    engine = Engine()
    first, second = (ray.remote(num_cpus=0)(Teacher).remote() for _ in range(2))
    ray.get([first.rows.remote(), second.rows.remote()])  # both have begun
    there = [None, first, None, second]
    feed = LearningFeed(cast(SpeculativeLM, engine), lambda: there.pop(0))
    feed.exchange()
    assert not engine.end_row("nobody is there")  # nothing is copied

    feed.exchange()
    assert engine.end_row("a")
    feed.exchange()
    assert ray.get(first.rows.remote()) == ["a"]

    def after_exchanges(condition: Callable[[], bool], what: str) -> None:
        """Exchange until it is so: a process that is killed may answer once more."""

        def exchanged() -> bool:
            feed.exchange()
            return condition()

        wait_until(exchanged, what)

    ray.get(second.publish.remote(4, {"w": torch.ones(1)}))
    ray.kill(first)
    after_exchanges(lambda: len(there) < 2, "nobody to be there any more")
    assert not engine.end_row("it has ended")
    after_exchanges(lambda: not there, "the other one to be found")
    after_exchanges(lambda: engine.end_row("b"), "rows to be wanted")
    after_exchanges(lambda: bool(ray.get(second.rows.remote())), "a row to arrive")
    assert ray.get(second.rows.remote()) == ["b"]
    assert engine.offered == [(4, [1.0])]
    assert not there
    ray.kill(second)


def test_a_learner_that_is_not_there_is_looked_for_now_and_then() -> None:
    looks: list[None] = []
    feed = LearningFeed(cast(SpeculativeLM, Engine()), lambda: looks.append(None))
    for _ in range(5):
        feed.exchange()
    assert len(looks) == 1

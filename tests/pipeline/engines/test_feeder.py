"""Who is in an engine together, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from drafter.engine.handle import Handle
from drafter.errors import EngineError, NotFiniteError, RequestError, RequestTimeoutError
from drafter.requests import Generation, Request, SamplingParams
from drafter.statistics import DecodeCounts
from pipeline.engines.feeder import Feeder, pause_after
from pipeline.engines.ledger import ALONE_FROM, Ledger, RowKey, RowOutcome
from pipeline.engines.models import capacity
from pipeline.errors import JobError
from tests.support.waiting import PATIENCE

SLOTS = 2


class SlowEngine:
    """Takes requests, and ends them when it is told to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: list[str] = []
        self.company: dict[str, set[str]] = {}
        self._inside: dict[str, Handle] = {}
        self._entered = threading.Condition()

    def submit(self, request: Request) -> Handle:
        if len(request.prompt_ids) > 9:
            raise RequestError("too long")
        handle = Handle(request, stream=False)
        with self._entered:
            self._inside[request.request_id] = handle
            self.order.append(request.request_id)
            for name in self._inside:
                self.company.setdefault(name, set()).update(self._inside)
            self._entered.notify_all()
        return handle

    def end(self, name: str, error: Exception | None = None, beside: Iterable[str] = ()) -> None:
        """End a request, as soon as it and those `beside` it are there."""
        with self._entered:
            assert self._entered.wait_for(lambda: self._inside.keys() >= {name, *beside}, timeout=PATIENCE)
            handle = self._inside.pop(name)
        if error is not None:
            handle.future.set_exception(error)
        else:
            handle.future.set_result(Generation(name, [1], "", "stop", 1, DecodeCounts()))


class LocalLedger(Ledger):
    """A ledger without Ray, for one engine."""

    def exchange(  # type: ignore[override]
        self, left: Mapping[RowKey, RowOutcome], entering: list[RowKey]
    ) -> bool:
        return super().exchange("engine", left, entering)


def columns(generation: Generation, request: Request) -> dict[str, Any]:
    return {"token_ids": generation.token_ids}


def requests(lengths: Mapping[str, int]) -> dict[str, Request]:
    return {name: Request([1] * length, SamplingParams(max_new_tokens=5), name) for name, length in lengths.items()}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_long_rows_go_first_and_only_so_many_are_inside(pool: ThreadPoolExecutor) -> None:
    engine, ledger = SlowEngine(SLOTS), LocalLedger()
    feeder = Feeder(engine.submit, columns, ledger, SLOTS)
    lengths = {str(length): length for length in (3, 9, 1, 4, 2, 8, 7, 5, 6)}
    call = pool.submit(feeder.generate, "p", requests(lengths), lambda outcomes: None)
    for name in "987654321":
        engine.end(name)
    assert set(call.result(PATIENCE)) == set("123456789")
    assert engine.order == list("987654321")
    assert max(map(len, engine.company.values())) <= 2 * capacity(SLOTS)
    assert ledger.counts().inside == 0


def test_a_row_under_suspicion_has_the_engine_to_itself(pool: ThreadPoolExecutor) -> None:
    engine, ledger = SlowEngine(SLOTS), LocalLedger()
    for _ in range(ALONE_FROM):
        ledger.open_part("p", 4)
        ledger.exchange({}, [RowKey("p", "a"), RowKey("p", "b")])
    feeder = Feeder(engine.submit, columns, ledger, SLOTS)
    call = pool.submit(feeder.generate, "p", requests({"a": 1, "b": 1, "c": 1, "d": 1}), lambda outcomes: None)
    for name, beside in (("a", ""), ("b", ""), ("c", "d"), ("d", "")):
        engine.end(name, beside=beside)
    assert set(call.result(PATIENCE)) == set("abcd")
    assert engine.company["a"] == {"a"}
    assert engine.company["b"] == {"b"}
    assert engine.company["c"] == engine.company["d"] == {"c", "d"}


def test_what_was_finished_does_not_enter_again_and_calls_run_side_by_side(pool: ThreadPoolExecutor) -> None:
    engine, ledger = SlowEngine(SLOTS), LocalLedger()
    before = RowOutcome(generated={"token_ids": [7]})
    ledger.exchange({RowKey("p", "a"): before}, [])
    feeder = Feeder(engine.submit, columns, ledger, SLOTS)
    reported: list[int] = []
    first = pool.submit(
        feeder.generate, "p", requests({"a": 1, "b": 1}), lambda outcomes: reported.append(len(outcomes))
    )
    second = pool.submit(feeder.generate, "q", requests({"c": 1, "d": 20}), lambda outcomes: None)
    engine.end("c")
    assert second.result(PATIENCE)["d"].problem == {
        "type": "Refused",
        "message": "too long",
        "input": None,
        "attempts": 1,
    }
    engine.end("b")
    assert first.result(PATIENCE)["a"] == before
    assert 2 not in reported  # the caller reports the whole, when it is written
    assert sorted(engine.order) == ["b", "c"]


def test_a_row_whose_time_is_up_is_an_error_and_a_failed_engine_fails_the_call(pool: ThreadPoolExecutor) -> None:
    engine = SlowEngine(SLOTS)
    feeder = Feeder(engine.submit, columns, LocalLedger(), SLOTS)
    call = pool.submit(feeder.generate, "p", requests({"a": 1}), lambda outcomes: None)
    engine.end("a", RequestTimeoutError("too slow"))
    assert call.result(PATIENCE)["a"].problem == {
        "type": "TimedOut",
        "message": "too slow",
        "input": None,
        "attempts": 1,
    }
    call = pool.submit(feeder.generate, "o", requests({"n": 1}), lambda outcomes: None)
    engine.end("n", NotFiniteError("it overflows"))
    problem = call.result(PATIENCE)["n"].problem
    assert problem is not None
    assert (problem["type"], problem["message"]) == ("NotFinite", "it overflows")
    call = pool.submit(feeder.generate, "q", requests({"b": 1}), lambda outcomes: None)
    engine.end("b", RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        call.result(PATIENCE)


def test_a_row_that_the_engine_cannot_take_is_refused_and_harms_no_other(pool: ThreadPoolExecutor) -> None:
    engine = SlowEngine(SLOTS)
    errors: dict[str, Exception] = {"a": OverflowError("too large"), "c": TypeError("no text"), "e": KeyError("x")}

    def submit(request: Request) -> Handle:
        if request.request_id in errors:
            raise errors[request.request_id]
        return engine.submit(request)

    feeder = Feeder(submit, columns, LocalLedger(), SLOTS)
    call = pool.submit(feeder.generate, "p", requests(dict.fromkeys("abcde", 1)), lambda outcomes: None)
    engine.end("b")
    engine.end("d")
    found = call.result(PATIENCE)
    assert {name for name, one in found.items() if one.generated is not None} == {"b", "d"}
    refused = [one.problem for one in found.values() if one.problem is not None]
    assert [one["type"] for one in refused] == ["Refused"] * 3
    assert refused[0]["message"] == "the engine cannot take it: OverflowError: too large"
    for error in (EngineError("a step failed"), MemoryError("no room")):
        errors["g"] = error
        call = pool.submit(Feeder(submit, columns, LocalLedger(), SLOTS).generate, "q", requests({"g": 1}), print)
        with pytest.raises(type(error)):
            call.result(PATIENCE)


def test_a_part_that_is_given_twice_at_once_is_an_error(pool: ThreadPoolExecutor) -> None:
    engine, ledger = SlowEngine(SLOTS), LocalLedger()
    feeder = Feeder(engine.submit, columns, ledger, SLOTS)
    first = pool.submit(feeder.generate, "p", requests({"a": 1, "b": 1}), lambda outcomes: None)
    engine.end("a")
    second = pool.submit(feeder.generate, "p", requests({"a": 1, "b": 1}), lambda outcomes: None)
    with pytest.raises(JobError, match="part p was given to an engine twice at once"):
        second.result(PATIENCE)
    # The first is unharmed, and afterwards the part may come again, as after an engine's death.
    engine.end("b")
    assert set(first.result(PATIENCE)) == {"a", "b"}
    again = pool.submit(feeder.generate, "p", requests({"a": 1, "b": 1}), lambda outcomes: None)
    assert set(again.result(PATIENCE)) == {"a", "b"}


def test_a_ledger_that_is_slow_because_all_engines_ask_it_is_asked_less_often() -> None:
    assert [pause_after(seconds) for seconds in (0.0, 0.01, 0.05, 60.0)] == [1.0, 1.0, 2.5, 5.0]

"""Engines that sleep, and what is concluded from the calls of hundreds of them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.generation_jobs.fake_engines import FakeEngine
from benchmarks.generation_jobs.fleet import Look, counted, summary
from benchmarks.generation_jobs.many_rows import memory_at
from drafter.requests import Request, SamplingParams
from pipeline.progress.board import PartReport, StatusBoard
from tests.pipeline.progress.conftest import engine
from tests.support.waiting import PATIENCE


def look(second: int, rows: int, engines: int) -> Look:
    """Each second the board has two calls, the ledger five, and the driver works for a tenth of it."""
    calls = {"StatusBoard": Counter(beat=2 * second), "Ledger": Counter(exchange=4 * second, commit=second)}
    return Look(second, rows, engines, calls, {"StatusBoard": 0.01 * second, "Ledger": 0.02 * second}, 0.1 * second)


def test_rates_are_those_of_the_time_with_all_engines() -> None:
    looks = [
        look(0, 0, 3),
        look(10, 640, 4),
        look(20, 1280, 4),
        look(30, 2560, 4),
        look(40, 3_900, 4),
        look(50, 4000, 2),
    ]
    found = summary(looks, engines=4, processes=2, rows=4000)
    assert (found["seconds"], found["rows_per_s"], found["parts_per_s"]) == (20.0, 96.0, 1.5)
    assert (found["board_calls_per_s"], found["ledger_calls_per_s"]) == (2.0, 5.0)
    assert (found["board_cores"], found["ledger_cores"], found["driver_cores"]) == (0.01, 0.02, 0.1)
    assert found["arrangement"].startswith("2 whole EngineActor in each process")
    with pytest.raises(SystemExit, match="no time with all 5 engines"):
        summary(looks, engines=5, processes=1, rows=4000)


def test_calls_that_another_call_makes_do_not_count() -> None:
    board = counted(StatusBoard, "beat", "put", "mail")()
    board.beat("e", engine(), {"p": PartReport(rows=1)})
    board.put("stage", "loading")
    assert board.mail("", 0).reports["part", "p"].rows == 1
    assert board.used()[0] == Counter(beat=1, put=1, mail=1)


def test_a_sleeping_engine_decodes_no_more_rows_than_it_has_slots() -> None:
    begun: list[int] = []
    fake = FakeEngine(2, row_seconds=0.01, tokens=3, on_row=lambda: begun.append(1))
    handles = [fake.submit(Request([1, 2], SamplingParams(), str(n))) for n in range(5)]
    assert fake.state().active <= 2
    made = [handle.result(PATIENCE) for handle in handles]
    assert [(one.request_id, one.token_ids, one.num_prompt_tokens) for one in made] == [
        (str(n), [0, 1, 2], 2) for n in range(5)
    ]
    assert begun == [1]


def test_memory_is_told_at_shares_of_the_rows() -> None:
    looks = [(0, {"driver": 10.0}), (480, {"driver": 20.04, "Ledger": 2.0}), (1000, {"driver": 30.0})]
    assert memory_at(looks, 0.5, 1000) == {"rows_done": 480, "Ledger": 2.0, "driver": 20.0}
    assert memory_at(looks, 0.95, 1000)["rows_done"] == 1000

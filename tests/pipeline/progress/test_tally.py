"""What engines report is added up: nothing twice, and nothing lost with the board."""

from __future__ import annotations

import time

import pytest

from pipeline.progress.board import PartReport, Progress, StatusBoard, Tally
from pipeline.progress.watch import line
from tests.pipeline.progress.conftest import engine


def fetch(board: StatusBoard, tally: Tally, now: float) -> Progress:
    tally.take(board.mail(tally.mail.life, tally.mail.number), now)
    return tally.progress(now)


def test_repeated_work_is_not_counted_twice() -> None:
    board, tally = StatusBoard(), Tally(total=9, before=0, errors_before=0)
    now = fetch(board, tally, time.time())
    assert (now.state, now.stage) == ("starting", "starting the engine's process")
    board.put("stage", "loading the model")
    assert fetch(board, tally, time.time()).stage == "loading the model"
    board.put("engine", engine(), "e1")
    board.put("part", PartReport(rows=3, errors=1, tokens=30, steps=10), "p1")
    board.put("part", PartReport(rows=2, errors=0, tokens=20, steps=10), "p2")
    assert fetch(board, tally, time.time()).rows == 5
    board.put("part", PartReport(rows=1, errors=1), "p1")  # its engine died, another began anew
    now = fetch(board, tally, time.time())
    assert (now.state, now.engines, now.rows, now.errors, now.tokens) == ("generating", 1, 3, 1, 20)
    assert now.acceptance_length == 2.0


def test_an_engine_reports_for_all_of_its_parts_in_one_call() -> None:
    board, tally = StatusBoard(), Tally(total=9, before=0, errors_before=0)
    board.beat("e1", engine(active=1), {"p1": PartReport(rows=3, tokens=30), "p2": PartReport(rows=2)})
    board.beat("e1", engine(active=2), {"p2": PartReport(rows=4)})  # before the driver asks: p1 is not lost
    now = fetch(board, tally, time.time())
    assert (now.engines, now.active, now.rows, now.tokens) == (1, 2, 7, 30)


def test_a_board_that_died_takes_nothing_along() -> None:
    tally = Tally(total=100, before=0, errors_before=0)
    board = StatusBoard()
    board.put("engine", engine(), "e1")
    for part in range(5):
        board.put("part", PartReport(rows=10, tokens=100), f"p{part}")
    board.put("crash", "device lost")
    assert fetch(board, tally, time.time()).rows == 50

    board = StatusBoard()  # as Ray starts it again: it knows nothing
    assert fetch(board, tally, time.time()).rows == 50
    board.put("part", PartReport(rows=12, tokens=120), "p4")  # it was on its way
    board.put("part", PartReport(rows=1, tokens=7), "p5")
    now = fetch(board, tally, time.time())
    assert (now.rows, now.tokens, now.crash) == (53, 527, "device lost")


def test_mail_that_got_lost_is_sent_again() -> None:
    board, tally = StatusBoard(), Tally(total=9, before=0, errors_before=0)
    board.put("part", PartReport(rows=3), "p1")
    board.mail(tally.mail.life, tally.mail.number)  # never arrives
    board.put("part", PartReport(rows=2), "p2")
    assert fetch(board, tally, 0.0).rows == 5
    assert board.mail(tally.mail.life, tally.mail.number).reports == {}  # what has arrived is kept no longer


def test_rows_that_were_kept_of_unfinished_parts_took_no_time() -> None:
    kept = {"p1": PartReport(rows=3, errors=1, tokens=20, steps=10)}
    board, tally = StatusBoard(), Tally(total=9, before=5, errors_before=1, kept=kept)
    board.put("engine", engine(), "e1")
    board.put("part", PartReport(rows=3, errors=1, tokens=20, steps=10), "p1")
    assert fetch(board, tally, time.time()).done == 5
    board.put("part", PartReport(rows=4, errors=1, tokens=27, steps=12), "p1")
    now = fetch(board, tally, time.time())
    assert (now.done, now.rows, now.errors, now.tokens) == (6, 1, 0, 7)


def test_engines_that_fell_silent_do_not_count_but_their_time_does() -> None:
    board, tally = StatusBoard(), Tally(total=9, before=0, errors_before=0)
    begun = time.time()
    board.put("engine", engine(seconds=40.0), "e1")
    fetch(board, tally, begun)
    board.put("engine", engine(seconds=5.0, active=1), "e2")
    now = fetch(board, tally, begun + 60)
    assert (now.engines, now.slots, now.active, now.engine_seconds) == (1, 4, 1, 45.0)


def rate_after(rows: dict[float, int], now: float, total: int = 1000, before: int = 0) -> Progress:
    """Progress at `now` seconds after the first engine, where `rows` says how many were done at which second."""
    board, tally = StatusBoard(), Tally(total, before, errors_before=0)
    board.put("engine", engine(), "e1")
    begun = board.mail("", 0).first["engine"]
    for second, done in rows.items():
        board.put("part", PartReport(rows=done, tokens=10 * done), "p")
        fetch(board, tally, begun + second)
    return tally.progress(begun + now)


def test_eta_of_a_resumed_job_counts_only_rows_that_took_time() -> None:
    fresh = rate_after({10: 20}, now=10, total=100)
    assert fresh.recent_row_rate == pytest.approx(2.0)
    assert fresh.eta_seconds == pytest.approx(40.0)
    # 900 rows were there before: 80 are left, at the same two rows a second.
    resumed = rate_after({10: 20}, now=10, total=1000, before=900)
    assert resumed.done == 920
    assert resumed.recent_row_rate == pytest.approx(2.0)
    assert resumed.eta_seconds == pytest.approx(40.0)


def test_the_rate_is_of_the_last_ten_minutes() -> None:
    # A hundred rows in the first minute, then one a second.
    rows = {60.0: 100} | {60.0 + second: 100 + second for second in range(10, 3600, 10)}
    now = rate_after(rows, now=3650, total=10_000)
    assert now.recent_row_rate == pytest.approx(1.0, rel=0.1)
    # A job that stands still does not keep its rate.
    assert rate_after({10: 20}, now=40).recent_row_rate == pytest.approx(0.5)
    assert rate_after({10: 20}, now=5000).recent_row_rate == pytest.approx(0.0, abs=0.01)


def test_there_is_no_eta_without_a_rate() -> None:
    assert rate_after({1: 0}, now=10).eta_seconds is None
    assert "? left" in line(rate_after({1: 0}, now=10))
    assert Progress(total=5, before=5).eta_seconds == 0.0
    assert Progress().eta_seconds is None

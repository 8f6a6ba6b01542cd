"""How far a job is: added up, shown, and written to its output."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from pyarrow import fs

from pipeline.cluster.ray_cluster import ActorResources
from pipeline.errors import JobError
from pipeline.io.files import Location
from pipeline.progress.board import EngineReport, PartReport, Progress, ProgressBoard, ProgressWatch, Tally
from pipeline.progress.display import Bar, Lines, display, line
from pipeline.progress.status_file import StatusFile
from tests.pipeline.conftest import FinishedJob
from tests.support.waiting import wait_until


def engine(seconds: float = 1.0, active: int = 3) -> EngineReport:
    return EngineReport(seconds, "a GPU", "f00", slots=4, active=active, waiting=2)


def fetch(board: ProgressBoard, tally: Tally, now: float) -> Progress:
    tally.take(board.mail(tally.life, tally.number), now)
    return tally.progress(now)


def test_repeated_work_is_not_counted_twice() -> None:
    board, tally = ProgressBoard(), Tally(total=9, before=0, errors_before=0)
    assert fetch(board, tally, time.time()).state == "starting"
    board.engine("e1", engine())
    board.update("p1", PartReport(rows=3, errors=1, tokens=30, steps=10))
    board.update("p2", PartReport(rows=2, errors=0, tokens=20, steps=10))
    assert fetch(board, tally, time.time()).rows == 5
    board.update("p1", PartReport(rows=1, errors=1))  # its engine died, another began anew
    now = fetch(board, tally, time.time())
    assert (now.state, now.engines, now.rows, now.errors, now.tokens) == ("generating", 1, 3, 1, 20)
    assert now.beta == 2.0


def test_a_board_that_died_takes_nothing_along() -> None:
    tally = Tally(total=100, before=0, errors_before=0)
    board = ProgressBoard()
    board.engine("e1", engine())
    for part in range(5):
        board.update(f"p{part}", PartReport(rows=10, tokens=100))
    board.crashed("device lost")
    assert fetch(board, tally, time.time()).rows == 50

    board = ProgressBoard()  # as Ray starts it again: it knows nothing
    assert fetch(board, tally, time.time()).rows == 50
    board.update("p4", PartReport(rows=12, tokens=120))  # it was on its way
    board.update("p5", PartReport(rows=1, tokens=7))
    now = fetch(board, tally, time.time())
    assert (now.rows, now.tokens, now.crash) == (53, 527, "device lost")


def test_mail_that_got_lost_is_sent_again() -> None:
    board, tally = ProgressBoard(), Tally(total=9, before=0, errors_before=0)
    board.update("p1", PartReport(rows=3))
    board.mail(tally.life, tally.number)  # never arrives
    board.update("p2", PartReport(rows=2))
    assert fetch(board, tally, 0.0).rows == 5
    assert board.mail(tally.life, tally.number).parts == {}  # what has arrived is kept no longer


def test_rows_that_were_kept_of_unfinished_parts_took_no_time() -> None:
    kept = {"p1": PartReport(rows=3, errors=1, tokens=20, steps=10)}
    board, tally = ProgressBoard(), Tally(total=9, before=5, errors_before=1, kept=kept)
    board.engine("e1", engine())
    board.update("p1", PartReport(rows=3, errors=1, tokens=20, steps=10))
    assert fetch(board, tally, time.time()).done == 5
    board.update("p1", PartReport(rows=4, errors=1, tokens=27, steps=12))
    now = fetch(board, tally, time.time())
    assert (now.done, now.rows, now.errors, now.tokens) == (6, 1, 0, 7)


def test_engines_that_fell_silent_do_not_count_but_their_time_does() -> None:
    board, tally = ProgressBoard(), Tally(total=9, before=0, errors_before=0)
    begun = time.time()
    board.engine("e1", engine(seconds=40.0))
    fetch(board, tally, begun)
    board.engine("e2", engine(seconds=5.0, active=1))
    now = fetch(board, tally, begun + 60)
    assert (now.engines, now.slots, now.active, now.engine_seconds) == (1, 4, 1, 45.0)


def rate_after(rows: dict[float, int], now: float, total: int = 1000, before: int = 0) -> Progress:
    """Progress at `now` seconds after the first engine, where `rows` says how many were done at which second."""
    board, tally = ProgressBoard(), Tally(total, before, errors_before=0)
    board.engine("e1", engine())
    mail = board.mail("", 0)
    assert mail.first is not None
    for second, done in rows.items():
        board.update("p", PartReport(rows=done, tokens=10 * done))
        fetch(board, tally, mail.first + second)
    return tally.progress(mail.first + now)


def test_eta_of_a_resumed_job_counts_only_rows_that_took_time() -> None:
    fresh = rate_after({10: 20}, now=10, total=100)
    assert fresh.row_rate == pytest.approx(2.0)
    assert fresh.eta_seconds == pytest.approx(40.0)
    # 900 rows were there before: 80 are left, at the same two rows a second.
    resumed = rate_after({10: 20}, now=10, total=1000, before=900)
    assert resumed.done == 920
    assert resumed.row_rate == pytest.approx(2.0)
    assert resumed.eta_seconds == pytest.approx(40.0)


def test_the_rate_is_of_the_last_ten_minutes() -> None:
    # A hundred rows in the first minute, then one a second.
    rows = {60.0: 100} | {60.0 + second: 100 + second for second in range(10, 3600, 10)}
    now = rate_after(rows, now=3650, total=10_000)
    assert now.row_rate == pytest.approx(1.0, rel=0.1)
    # A job that stands still does not keep its rate.
    assert rate_after({10: 20}, now=40).row_rate == pytest.approx(0.5)
    assert rate_after({10: 20}, now=5000).row_rate == pytest.approx(0.0, abs=0.01)


def test_there_is_no_eta_without_a_rate() -> None:
    assert rate_after({1: 0}, now=10).eta_seconds is None
    assert "? left" in line(rate_after({1: 0}, now=10))
    assert Progress(total=5, before=5).eta_seconds == 0.0
    assert Progress().eta_seconds is None


def test_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    lines = display(stream)
    assert isinstance(lines, Lines)
    lines.show(Progress("generating", total=8, rows=1))
    assert stream.getvalue() == ""  # it is too soon
    lines.show(Progress("finished", 8, before=3, rows=5, errors=2, tokens=10, steps=4, row_rate=2.0, token_rate=1200.0))
    assert stream.getvalue() == "8/8 rows, 2.0 rows/s, 1,200 tokens/s, β 2.50, 00:00 left, 2 errors\n"


def test_a_bar_shows_the_same_figures() -> None:
    stream = io.StringIO()
    bar = Bar(stream)
    bar.show(Progress("generating", total=10, before=4, rows=1, row_rate=0.5, token_rate=20.0))
    assert "generating  50%|" in stream.getvalue()
    assert "| 5/10, 0.5 rows/s, 20 tokens/s, 00:10 left" in stream.getvalue()
    bar.show(Progress("failed", total=10, before=4, rows=1))
    assert "failed" in stream.getvalue()


class Seen:
    """A viewer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Progress] = []

    def show(self, now: Progress) -> None:
        self.shown.append(now)

    def wait_for(self, rows: int) -> None:
        wait_until(lambda: self.shown and self.shown[-1].rows == rows, f"{rows} rows")


class MortalBoard(ProgressBoard):
    """A board that tells whom to kill."""

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_progress_survives_the_death_of_its_actor(local_ray: None) -> None:
    board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(MortalBoard).remote()
    seen = Seen()
    started: list[Progress] = []
    with ProgressWatch(board, Tally(20, 5, 0), started.append, [seen]) as watch:
        board.engine.remote("e1", engine())
        board.update.remote("p1", PartReport(rows=4, tokens=40))
        seen.wait_for(rows=4)
        os.kill(ray.get(board.pid.remote()), signal.SIGKILL)
        board.update.remote("p2", PartReport(rows=3, tokens=30))
        seen.wait_for(rows=7)
    assert len(started) == 1
    # The end needs no reports: all parts are in the output.
    assert (watch.last.rows, watch.last.done, watch.last.tokens) == (15, 20, 70)
    assert seen.shown[-1] == watch.last


# ---- the status file


def place(folder: Path) -> Location:
    return Location(fs.LocalFileSystem(), str(folder / "status.json"))


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def test_status_of_submissions_that_fail_stop_and_finish(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"row_rate": 2.0, "engines": 2, "engine_seconds": 6.0}
    half = Progress("generating", 10, rows=4, errors=1, tokens=40, steps=20, **rates)

    def fails(status: StatusFile) -> None:
        assert read(tmp_path)["state"] == "starting"
        status.takes(ActorResources(cpus=3.0, gpus=0.5, min_actors=1, max_actors=2))
        status.show(half)
        now = read(tmp_path)
        assert (now["state"], now["rows_done"], now["rows_total"], now["errors"]) == ("generating", 4, 10, 1)
        assert (now["eta_seconds"], now["mean_acceptance_length"], now["engines"]) == (3.0, 2.0, 2)
        raise JobError("the cluster\nis gone")

    with pytest.raises(JobError), StatusFile(place(tmp_path)) as status:
        fails(status)
    now = read(tmp_path)
    assert (now["state"], now["failure"], now["rows_done"]) == ("failed", "the cluster is gone", 4)

    with pytest.raises(KeyboardInterrupt), StatusFile(place(tmp_path)):
        raise KeyboardInterrupt
    assert read(tmp_path)["state"] == "stopped"

    with StatusFile(place(tmp_path)) as status:
        status.show(Progress("generating", 10, before=4, errors_before=1, rows=6, crash="device lost"))
    now = read(tmp_path)
    assert (now["state"], now["rows_done"], now["errors"], now["eta_seconds"]) == ("finished", 10, 1, 0.0)
    assert (now["failure"], now["last_crash"]) == (None, "device lost")
    # What each submission took is kept.
    assert [one["rows"] for one in now["submissions"]] == [4, 0, 6]
    assert [one["gpu_seconds"] for one in now["submissions"]] == [3.0, 0.0, 0.0]
    assert [one["cpu_seconds"] for one in now["submissions"]] == [18.0, 0.0, 0.0]
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]


def test_a_status_that_cannot_be_written_does_not_stop_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StatusFile(place(tmp_path / "missing")) as status:
        status.show(Progress("generating"))
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_status_of_a_job(finished_job: FinishedJob) -> None:
    done = finished_job.outcome
    now = read(done.folder)
    assert (now["state"], now["rows_total"], now["rows_done"], now["errors"]) == ("finished", 9, 9, 2)
    tokens = sum(row["num_output_tokens"] for row in done.rows)
    assert [(one["rows"], one["tokens"]) for one in now["submissions"]] == [(9, tokens)]
    assert now["submissions"][0]["gpu_seconds"] == 0
    assert now["submissions"][0]["cpu_seconds"] > 0
    beta = tokens / sum(row["num_decode_steps"] for row in done.rows)
    assert now["mean_acceptance_length"] == pytest.approx(beta, abs=1e-4)

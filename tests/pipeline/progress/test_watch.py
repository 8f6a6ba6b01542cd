"""The watch shows how far a job is, even when the board dies."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from pipeline.progress.board import PartReport, Progress, StatusBoard, Tally
from pipeline.progress.watch import ProgressWatch
from tests.pipeline.progress.conftest import engine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


class Seen:
    """A viewer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Progress] = []

    def show(self, now: Progress) -> None:
        self.shown.append(now)

    def wait_for(self, rows: int) -> None:
        wait_until(lambda: self.shown and self.shown[-1].rows == rows, f"{rows} rows")


class MortalBoard(StatusBoard):
    """A board that tells whom to kill."""

    def pid(self) -> int:
        return os.getpid()


def test_progress_survives_the_death_of_its_actor(local_ray: None) -> None:
    board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(MortalBoard).remote()
    seen = Seen()
    started: list[Progress] = []
    with ProgressWatch(board, Tally(20, 5, 0), started.append, [seen]) as watch:
        board.put.remote("engine", engine(), "e1")
        board.put.remote("part", PartReport(rows=4, tokens=40), "p1")
        seen.wait_for(rows=4)
        os.kill(ray.get(board.pid.remote()), signal.SIGKILL)
        board.put.remote("part", PartReport(rows=3, tokens=30), "p2")
        seen.wait_for(rows=7)
    assert len(started) == 1
    # The end needs no reports: all parts are in the output.
    assert (watch.last.rows, watch.last.done, watch.last.tokens) == (15, 20, 70)
    assert seen.shown[-1] == watch.last

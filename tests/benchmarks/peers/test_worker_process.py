"""The protocol over a real process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.environments import PeerError
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.peers.workers.protocol import Settings, Work
from tests.support.waiting import PATIENCE, wait_until

Starter = Callable[[str], WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts an echo of a variant, and ends it after the test."""
    started: list[WorkerProcess] = []

    def make(variant: str) -> WorkerProcess:
        settings = Settings("", "float32", variant, 1, 8, [0], 1, str(tmp_path))
        started.append(WorkerProcess(Path(sys.executable), "tests.benchmarks.peers.workers.echo", settings, PATIENCE))
        return started[-1]

    yield make
    for process in started:
        process.close()


def test_chatter_does_not_reach_the_answers(start: Starter) -> None:
    process = start("plain")
    assert process.versions == {"pytest": pytest.__version__}
    for _ in range(2):
        done = process.decode(Work([[1, 2, 3], [4]], 2))
        assert done.tokens == [[1, 2], [4]]
        assert 0 < done.seconds < PATIENCE
        assert done.peak_bytes > 2**20


def test_an_answer_may_be_longer_than_a_pipe(start: Starter) -> None:
    prompt = list(range(100_000))
    assert start("plain").decode(Work([prompt, prompt], len(prompt))).tokens == [prompt, prompt]


def test_it_is_stopped_between_its_turns(start: Starter) -> None:
    before = set(psutil.Process().children())
    process = start("plain")
    (child,) = set(psutil.Process().children()) - before
    for _ in range(2):
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED, "the process stops")
        assert process.decode(Work([[1]], 1)).tokens == [[1]]


def test_one_that_does_not_start_says_why(start: Starter) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(PeerError, match=r"^RuntimeError: it is broken$"):
        start("broken")
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("fails", "^ValueError: no such prompt$"), ("dies", "^it ended with exit code 3: last words$")],
)
def test_one_that_fails_says_why(start: Starter, variant: str, reason: str) -> None:
    process = start(variant)
    with pytest.raises(PeerError, match=reason):
        process.decode(Work([[1]], 1))
    with pytest.raises(PeerError, match="it ended with exit code"):
        process.decode(Work([[1]], 1))


def test_patience_has_an_end(start: Starter) -> None:
    process = start("hangs")
    process._patience = 1.0  # only now: to start takes as long as it takes
    with pytest.raises(PeerError, match="no answer within 1 seconds"):
        process.decode(Work([[1]], 1))

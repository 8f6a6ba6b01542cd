from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from drafter.confined import BoundError, Bounds, Confined

pytestmark = pytest.mark.usefixtures("started_preparations")
ROOMY = Bounds(256 << 20, 30.0)


def prepared(number: int) -> Callable[..., Any]:
    def work(what: str, *given: Any) -> Any:
        match what:
            case "add":
                return number + sum(one.sum() if isinstance(one, np.ndarray) else one for one in given), os.getpid()
            case "ones":
                return np.ones(given, np.uint8)
            case "spin":
                while True:
                    pass
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                return resource.getrlimit(resource.RLIMIT_AS)[0]
        raise ValueError("no such thing")

    return work


def unpreparable() -> Callable[..., Any]:
    raise ValueError("it is not there")


@pytest.fixture(scope="module")
def confined() -> Confined:
    return Confined(prepared, 7)


def test_work_is_done_in_another_process_that_is_kept(confined: Confined) -> None:
    total, worker = confined.run("add", 1, np.arange(3), bounds=ROOMY)
    assert (total, worker != os.getpid()) == (11, True)
    assert confined.run("add", bounds=ROOMY) == (7, worker)
    np.testing.assert_array_equal(confined.run("ones", 3, 2, bounds=ROOMY), np.ones((3, 2)))
    assert confined.run("ones", 0, bounds=ROOMY).shape == (0,)
    with pytest.raises(ValueError, match="no such thing"):
        confined.run("raise", bounds=ROOMY)
    assert confined.run("add", bounds=ROOMY) == (7, worker)


def test_what_exceeds_a_limit_costs_nobody_else_anything(confined: Confined) -> None:
    for what, bounds, why in (
        (("ones", 300 << 20), ROOMY, "takes more than 256 MiB of memory"),
        (("spin",), Bounds(1 << 20, 0.1), "takes more than 0.1 seconds"),
        (("die",), ROOMY, "ends the process"),
    ):
        _, worker = confined.run("add", bounds=ROOMY)
        before = confined.seconds
        with pytest.raises(BoundError, match=why):
            confined.run(*what, bounds=bounds)
        assert confined.seconds > before
        assert confined.run("add", bounds=ROOMY)[1] != worker
    assert confined.run("ones", 200 << 20, bounds=ROOMY).nbytes == 200 << 20  # and this worker ends with its work
    assert confined.run("memory", bounds=Bounds(2**63 - 1, 1.0)) == resource.getrlimit(resource.RLIMIT_AS)[0]


def test_work_is_stopped_and_several_pieces_are_done_at_once(confined: Confined) -> None:
    found: list[str] = []

    def spin() -> None:
        with pytest.raises(BoundError) as stopped:
            confined.run("spin", bounds=ROOMY)
        found.append(str(stopped.value))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(confined._busy) < 2:
        confined.run("add", bounds=ROOMY)  # beside them
    confined.stop()
    for thread in threads:
        thread.join()
    assert found == ["it was stopped"] * 2
    assert confined.run("add", bounds=ROOMY)[0] == 7


def test_a_worker_that_has_died_since_is_nobodys_loss(confined: Confined) -> None:
    _, worker = confined.run("add", bounds=ROOMY)
    os.kill(worker, signal.SIGKILL)
    while not confined._idle[0].gone:
        pass
    assert confined.run("add", bounds=ROOMY)[1] != worker


def test_a_process_that_has_died_is_replaced_and_a_failure_to_prepare_is_said() -> None:
    confined = Confined(prepared, 1)
    assert confined.run("add", bounds=ROOMY)[0] == 1
    assert confined._prepared is not None
    confined._prepared._process.kill()
    confined._prepared._process.wait()
    assert confined.run("add", 1, bounds=ROOMY)[0] == 2
    with pytest.raises(ValueError, match="it is not there"):
        Confined(unpreparable).run(bounds=ROOMY)

"""Threads that end with what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from drafter.devices import in_passing_thread


def test_the_thread_ends_with_its_work() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_errors_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 / 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "given", "policy"),
    [
        ("drafter.engine.engine", {}, "PASSIVE"),
        ("pipeline.training.job", {}, "PASSIVE"),
        ("drafter.engine.engine", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_threads_wait_asleep(module: str, given: dict[str, str], policy: str) -> None:
    """Whatever is imported first, and unless the user has said otherwise. OpenMP itself says how its threads wait."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE", **given}
    command = [sys.executable, "-c", f"import {module}, torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"'{policy}'" in next(line for line in done.stderr.splitlines() if "OMP_WAIT_POLICY" in line)

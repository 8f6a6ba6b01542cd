"""Threads that change where it hurts: a test, or code, that counts on an order which nothing enforces fails under it.

    pytest -p tests.support.jitter --jitter SEED …

Each lock that is made from then on pauses at random before it is taken and after it is given back. Conditions, events,
queues, futures and pools are made of locks. Python changes threads every microsecond, and files run in a random order.
The processes of Ray's workers do the same (`tests.support.prepared_workers`).
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

_VARIABLE = "DRAFTER_TEST_JITTER"
"""The seed, for the processes of this one."""
_SHARE = 0.2
"""Of the places where a thread can pause, those where it does."""
_LONGEST = 2e-3
"""Seconds of a pause; a thread that is awake takes some microseconds to its next lock."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jitter", type=int, help="seed of the pauses at locks, and of the order of files")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--jitter")
    if seed is not None:
        os.environ[_VARIABLE] = str(seed)
        jitter()


@pytest.hookimpl(wrapper=True)  # before `tests/conftest.py` sorts them into groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    seed = config.getoption("--jitter")
    if seed is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)  # the same order in each process, as pytest-xdist asks
        items.sort(key=lambda item: files.index(item.path))
    return (yield)


def jitter() -> None:
    """Begin, if this process or the one that started it was asked to."""
    seed = os.environ.get(_VARIABLE)
    if seed is None or threading.Lock is not _LOCK:
        return
    sys.setswitchinterval(1e-6)
    draws = random.Random(int(seed))

    def pause() -> None:
        if draws.random() < _SHARE:
            time.sleep(_LONGEST * draws.random())

    vars(threading).update(
        Lock=lambda: _PausingLock(_LOCK(), pause),
        RLock=lambda: _PausingLock(_RLOCK(), pause),
    )


_LOCK, _RLOCK = threading.Lock, threading.RLock


class _PausingLock:
    def __init__(self, lock: Any, pause: Any) -> None:
        self._lock, self._pause = lock, pause

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._pause()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        self._lock.release()
        self._pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._lock, name)  # of those that conditions use, and those of processes that fork

        def pausing(*arguments: Any) -> Any:
            self._pause()
            return method(*arguments)

        return pausing

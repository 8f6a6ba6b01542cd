"""Threads that end with what they do."""

from __future__ import annotations

import threading

import pytest

from drafter.threads import in_passing_thread


def test_the_thread_ends_with_its_work() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_errors_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 / 0)

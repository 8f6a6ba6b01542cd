"""Stopping a job in good order."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray

from pipeline.errors import JobStopped
from pipeline.stopping import Stopping


def test_a_request_ends_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        stopping.stop("another works on it")
        time.sleep(60)

    stopping = Stopping()
    with pytest.raises(JobStopped, match="another works on it"), stopping:
        wait()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_is_heard_while_ray_waits(local_ray: None) -> None:
    def wait() -> None:
        stopping.take_over()
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        ray.get(ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote())

    stopping = Stopping()
    with pytest.raises(JobStopped, match="by SIGTERM"), stopping:
        wait()


def test_an_interrupt_by_the_user_stays_what_it_is() -> None:
    # Shells start what runs in the background with interrupts ignored, tests too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised, Stopping():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised.type is KeyboardInterrupt


def test_an_error_of_the_cleanup_after_a_request_is_not_hidden() -> None:
    def job() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"), Stopping():
        job()


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(KeyError), Stopping():
        raise KeyError("a")

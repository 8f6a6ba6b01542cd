"""Stopping a job in good order."""

from __future__ import annotations

import os
import signal
import time

import pytest

from pipeline.stopping import Stopping, StopRequestedError


def test_a_request_ends_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        stopping.stop("another works on it")
        time.sleep(60)

    stopping = Stopping()
    with pytest.raises(StopRequestedError, match="another works on it"), stopping:
        wait()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_that_compiled_code_turned_into_another_error_is_still_a_request() -> None:
    def compiled() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StopRequestedError as request:
            raise SystemError("returned a result with an exception set") from request

    with pytest.raises(StopRequestedError, match="by SIGTERM"), Stopping():
        compiled()


def test_a_request_in_disguise_is_known_through_the_error_of_a_job() -> None:
    def job() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StopRequestedError as request:
            disguise = SystemError("returned a result with an exception set")
            disguise.__cause__ = request
            raise RuntimeError("the job failed") from disguise

    with pytest.raises(StopRequestedError), Stopping():
        job()


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

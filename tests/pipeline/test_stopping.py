"""Stopping a job in good order."""

from __future__ import annotations

import os
import signal

import pytest

from pipeline.stopping import Stopping, StopRequestedError


def test_a_request_ends_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequestedError, match="another works on it"), Stopping() as stopping:
        stopping.stop("another works on it")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_that_compiled_code_turned_into_another_error_is_still_a_request() -> None:
    def compiled() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StopRequestedError as request:
            raise SystemError("returned a result with an exception set") from request

    with pytest.raises(StopRequestedError, match="by SIGTERM"), Stopping():
        compiled()


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(KeyError), Stopping():
        raise KeyError("a")

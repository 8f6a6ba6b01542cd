"""Orderly stop of a job: SIGTERM, as before a spot machine is taken away, lets rows finish first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipeline.errors import JobStopped

BY_SIGNAL = "by SIGTERM"
_INSIST_SECONDS = 15.0


class Stopping:
    """Ends a `with` block in the main thread by `JobStopped`, on SIGTERM or `stop`."""

    def __init__(self) -> None:
        self._drain: Callable[[], None] | None = None
        self._main = threading.main_thread()
        self._reason: str | None = None
        self._draining = self._active = self._requested = False
        self._lock = threading.Lock()
        self._before: Any = None

    def stop(self, reason: str) -> None:
        """End the block now, unless it has ended. Thread-safe."""
        self._reason = reason
        threading.Thread(target=self._insist, name="stop", daemon=True).start()

    @contextmanager
    def draining(self, drain: Callable[[], None]) -> Iterator[None]:
        """Within this block, make SIGTERM first call `drain` in another thread, and stop when that returns."""
        self._drain = drain
        try:
            yield
        finally:
            self._drain = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is self._main:  # no other thread may handle signals
            self._before = signal.getsignal(signal.SIGTERM)
            self._active = True
            self.take_over()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            active, self._active = self._active, False
        if active:
            signal.signal(signal.SIGTERM, self._before)
        if kind is KeyboardInterrupt and self._requested:  # Ray raises a new one for our error
            raise JobStopped(self._reason or BY_SIGNAL)

    def take_over(self) -> None:
        """Handle SIGTERM again: Ray installs its own handler when it starts."""
        if self._active:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _insist(self) -> None:
        while True:  # an error that is raised while an object is finalised is lost
            with self._lock:
                if not self._active or self._main.ident is None:
                    return
                signal.pthread_kill(self._main.ident, signal.SIGTERM)  # wakes the main thread from any wait
            time.sleep(_INSIST_SECONDS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        drain, self._drain = self._drain, None
        if self._reason is not None or (drain is None and not self._draining):
            self._requested = True
            raise JobStopped(self._reason or BY_SIGNAL)
        if drain is not None:
            self._draining = True
            threading.Thread(target=self._drain_and_stop, args=[drain], name="drain", daemon=True).start()

    def _drain_and_stop(self, drain: Callable[[], None]) -> None:
        try:
            drain()
        finally:
            self.stop(BY_SIGNAL)


def in_thread(work: Callable[[], object]) -> Future[None]:
    """Do `work` in a thread, so that signals reach this one whatever it waits for; its errors are raised by `result`.

    No exit waits for the thread, as it would for a pool's.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="work", daemon=True).start()
    return done

"""A thread that does something every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pulse:
    """Calls something every few seconds, in a thread that ends with the process.

    Args:
        seconds: Seconds between two calls.
        work: What to call. An exception from it ends the thread, and Python prints it.
    """

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Start the thread; the first call comes after `seconds`."""
        self._thread.start()

    def end(self) -> None:
        """Call once more, and wait until that call and the thread have ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(self._seconds)
            self._work()

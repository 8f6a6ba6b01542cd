"""Something is done every so often, beside everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pulse:
    """Calls something every few seconds, in a thread that ends with the process.

    Args:
        seconds: How often.
        work: What to call. What it raises ends the pulse, and is shown by Python as any thread's end is.
    """

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """The first call comes when the first of the seconds have passed."""
        self._thread.start()

    def end(self) -> None:
        """Call it once more, and wait for the end of that."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(self._seconds)
            self._work()

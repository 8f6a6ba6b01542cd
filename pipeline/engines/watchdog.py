"""A watchdog for steps of an engine that never end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_LOOKS = 10
"""How often the watchdog looks within the time that a step may take."""


class Stepping(Protocol):
    """What a watchdog sees of an engine; `last_step` is when it last ended a step, by `time.monotonic`."""

    last_step: float

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""


def watch(engine: Stepping, seconds: float, stuck: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls `stuck`, once, when a step takes longer than `seconds`."""

    def look() -> None:
        while engine.idle or time.monotonic() - engine.last_step <= seconds:
            time.sleep(seconds / _LOOKS)
        stuck()

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    return thread

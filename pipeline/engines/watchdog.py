"""A step of an engine that never ends is ended with its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_LOOKS = 10
"""How often the limit is looked at while it runs."""


class Stepping(Protocol):
    """What a watchdog sees of an engine."""

    last_step: float

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""


def watch(engine: Stepping, seconds: float, stuck: Callable[[], None]) -> threading.Thread:
    """Call `stuck`, once, when a step takes longer than `seconds`; from a thread that begins with this call."""

    def look() -> None:
        while engine.idle or time.monotonic() - engine.last_step <= seconds:
            time.sleep(seconds / _LOOKS)
        stuck()

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    return thread

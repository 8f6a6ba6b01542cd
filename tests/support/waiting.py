"""Waiting for conditions instead of for times: how long something takes says nothing on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 600.0
"""Seconds after which a test gives up. Nothing that works takes so long, however busy the machine is."""

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found | None], what: str, pause: float = 0.05) -> Found:
    """Ask again and again, and return the first answer that is true.

    Args:
        condition: What is waited for. It may raise to say that it can no longer happen.
        what: Names it in the failure.
        pause: Seconds between two questions.
    """
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting after {PATIENCE:g} seconds: {what}"
        time.sleep(pause)
    return found

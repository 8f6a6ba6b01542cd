"""The requests that wait for a slot: first come, first served."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several

from drafter.engine.sequences.sequence import Sequence
from drafter.errors import EngineError, QueueFullError


class WaitingQueue:
    """Any thread may put requests in; the engine's takes them out.

    Args:
        limit: Most requests that may wait.

    Attributes:
        closed: Why later requests are refused; None while they are not.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Sequence] = deque()
        self._lock = threading.Lock()
        self.closed: EngineError | None = None
        # Nobody becomes unwanted before this (monotonic seconds): most steps need not look at all who wait.
        self._check_at = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sequence: Sequence) -> None:
        """Put a request at the end.

        Raises:
            QueueFullError: Too many wait already.
            EngineError: The queue is closed.
        """
        with self._lock:
            if self.closed is not None:
                raise self.closed
            if len(self._waiting) >= self._limit:
                raise QueueFullError(f"{self._limit} requests are waiting already: submit again later")
            self._waiting.append(sequence)
            self._check_at = min(self._check_at, sequence.handle.deadline)

    def put_back(self, sequences: Several[Sequence]) -> None:
        """Put requests at the front, in their order; they had been taken before, so the limit does not count."""
        with self._lock:
            self._waiting.extendleft(reversed(sequences))
            self._check_at = -math.inf

    def take(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The request that has waited longest, or None; also if that one does not fit, so that none overtakes it."""
        with self._lock:
            return self._waiting.popleft() if self._waiting and fits(self._waiting[0]) else None

    def look_again(self) -> None:
        """A request has been cancelled; it may be one that waits."""
        with self._lock:
            self._check_at = -math.inf

    def take_unwanted(self, now: float) -> list[Sequence]:
        """The requests that need no slot any more: cancelled, or out of time at `now` (monotonic seconds)."""
        if now < self._check_at:
            return []
        with self._lock:
            unwanted = [sequence for sequence in self._waiting if sequence.handle.unwanted(now)]
            for sequence in unwanted:
                self._waiting.remove(sequence)
            self._check_at = min((sequence.handle.deadline for sequence in self._waiting), default=math.inf)
        return unwanted

    def close(self, error: EngineError) -> list[Sequence]:
        """Refuse later requests with `error`; return those that wait."""
        with self._lock:
            self.closed = error
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting

"""Requests that wait for a slot, shared fairly between salts."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence as Several

from drafter.engine.sequence import Sequence
from drafter.errors import EngineError, QueueFullError


class WaitingQueue:
    """At most `limit` requests that wait for a slot: of each salt first come, first served. Thread-safe.

    Salts take turns. Where others fill the queue, a salt may still have its share of the limit in it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, deque[Sequence]] = {}  # of each salt that has any; the one served last comes last
        self._lock = threading.Lock()
        self.closed: EngineError | None = None  # why later requests are refused
        self.salted = False  # whether a request had a salt: otherwise all is first come, first served
        # No request becomes unwanted before this (monotonic seconds), so most steps need not look at all of them.
        self._check_at = math.inf

    def __len__(self) -> int:
        return sum(map(len, tuple(self._waiting.values())))

    @property
    def salts(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    @property
    def streamed(self) -> bool:
        """True if one of them is streamed."""
        with self._lock:
            return any(sequence.handle.streams for sequence in self._all())

    def refuse_full(self, salt: str) -> None:
        """Raise `QueueFullError` if no further request of `salt` may wait, or why the queue is closed."""
        with self._lock:
            self._refuse_full(salt)

    def _refuse_full(self, salt: str) -> None:
        if self.closed is not None:
            raise self.closed
        share = self._limit // len({salt, *self._waiting})
        if len(self) >= self._limit and len(self._waiting.get(salt, ())) >= share:
            raise QueueFullError(f"{len(self)} requests are waiting already: submit again later")

    def put(self, sequence: Sequence) -> None:
        """Put a request behind the others of its salt; raises as `refuse_full` does."""
        with self._lock:
            self._refuse_full(sequence.salt)
            self._waiting.setdefault(sequence.salt, deque()).append(sequence)
            self._check_at = min(self._check_at, sequence.handle.deadline)
            self.salted |= bool(sequence.salt)

    def put_back(self, sequences: Several[Sequence]) -> None:
        """Put requests that had been taken before others of their salts, in their order. The limit does not count."""
        with self._lock:
            for sequence in reversed(sequences):
                self._waiting.setdefault(sequence.salt, deque()).appendleft(sequence)
            self._check_at = -math.inf

    def first(self, in_slots: Several[Sequence]) -> Sequence | None:
        """Return the oldest request of the salt that has the fewest of those `in_slots`; None if none waits."""
        with self._lock:
            if len(self._waiting) < 2:
                return next((waiting[0] for waiting in self._waiting.values()), None)
            held = Counter(sequence.salt for sequence in in_slots)
            return self._waiting[min(self._waiting, key=lambda salt: held[salt])][0]

    def remove(self, sequence: Sequence) -> None:
        """Take out a request that waits, and let other salts go before its own."""
        with self._lock:
            waiting = self._waiting.pop(sequence.salt)
            waiting.remove(sequence)
            if waiting:
                self._waiting[sequence.salt] = waiting

    def look_again(self) -> None:
        """Note that a request has been cancelled, which may be one that waits."""
        with self._lock:
            self._check_at = -math.inf

    def take_unwanted(self, now: float) -> list[Sequence]:
        """Take out all that are cancelled, or out of time at `now` (monotonic seconds)."""
        if now < self._check_at:
            return []
        with self._lock:
            unwanted: list[Sequence] = []
            wanted: dict[str, deque[Sequence]] = {}
            self._check_at = math.inf
            for sequence in self._all():
                if sequence.handle.unwanted(now):
                    unwanted.append(sequence)
                else:
                    wanted.setdefault(sequence.salt, deque()).append(sequence)
                    self._check_at = min(self._check_at, sequence.handle.deadline)
            self._waiting = wanted
        return unwanted

    def close(self, error: EngineError) -> list[Sequence]:
        """Refuse later requests with `error`; return those that wait."""
        with self._lock:
            self.closed = error
            waiting = self._all()
            self._waiting.clear()
        return waiting

    def _all(self) -> list[Sequence]:
        return [sequence for waiting in self._waiting.values() for sequence in waiting]

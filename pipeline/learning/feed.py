"""An engine's link to the learner: rows go there, versions of the head come back.

The link runs in its own thread. The engine never waits for it, and a failure costs drafts only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from drafter.errors import one_line
from drafter.llm import SpeculativeLM
from drafter.methods.learning.drafter import changing_head
from drafter.methods.learning.rows import SampleTap
from pipeline.progress.watch import Pulse

_PULSE_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_FIND_SECONDS = 3.0  # time between searches for a missing learner, as each asks the cluster's head
_BATCH_BYTES = 16 << 20  # most bytes of rows in transit to the learner; more follow once they have arrived


@dataclass(frozen=True)
class Answer:
    """The learner's reply to an engine. `weights` has one reference, not fetched by Ray in a tuple, or none."""

    wants_rows: bool
    number: int | None = None
    weights: tuple[ray.ObjectRef[Any], ...] = ()


class LearningFeed:
    """Passes rows of an engine to a learner, and versions of the head to the engine.

    `find` returns the current `LearnerActor`; None if there is none.
    """

    def __init__(self, lm: SpeculativeLM, find: Callable[[], Any | None]) -> None:
        assert isinstance(lm.samples, SampleTap)
        self._head, self._samples, self._find = changing_head(lm.engine.drafter), lm.samples, find
        self._learner: Any | None = None
        self._call: Any = None
        self._number: int | None = None
        self._paused, self._find_at = False, 0.0
        self._pulse = Pulse(_PULSE_SECONDS, self.exchange)

    def start(self) -> None:
        self._pulse.start()

    def exchange(self) -> None:
        """Send rows, and fetch a new version; do nothing while the learner does not answer."""
        try:
            if self._learner is None and time.monotonic() >= self._find_at:
                self._learner, self._find_at = self._find(), time.monotonic() + _FIND_SECONDS
            if self._learner is None:
                self._pause(True)
                return
            if self._call is None:
                self._call = self._give(self._learner)
            answer: Answer = ray.get(self._call, timeout=_ANSWER_SECONDS)
            self._call = None
            self._pause(not answer.wants_rows)
            if answer.number is not None and answer.number != self._number:
                self._offer(answer.number, answer.weights[0])
        except ray.exceptions.GetTimeoutError:
            return  # the learner is being started, or has much to do: no other rows leave meanwhile
        except Exception as error:  # whatever it is: the next exchange may go well
            if not isinstance(error, ray.exceptions.RayError):  # a learner that dies perhaps comes back
                print(f"nothing is exchanged with the learner for now: {one_line(error)}", file=sys.stderr, flush=True)
            self._learner = self._call = None
            self._pause(True)

    def _offer(self, number: int, reference: Any) -> None:
        weights = ray.get(reference, timeout=_ANSWER_SECONDS)
        self._number = number
        try:
            self._head.offer(number, weights)
        except Exception as error:  # such as too little memory, or weights of another shape
            print(f"version {number} is not taken: {one_line(error)}", file=sys.stderr, flush=True)

    def _give(self, learner: Any) -> Any:
        rows = self._samples.take(_BATCH_BYTES)
        return learner.exchange.remote([ray.put(rows)] if rows else [])

    def _pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            (self._samples.pause if paused else self._samples.resume)()

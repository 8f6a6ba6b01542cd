"""An engine's link to the learner: rows go there, versions of the head come back.

It runs in its own thread. The engine never waits for it, and a failure costs drafts only.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ray
from torch import Tensor

from drafter.errors import one_line
from drafter.llm import SpeculativeLM
from drafter.methods.learning.rows import SampleTap
from pipeline.learning.beats import EngineBeat
from pipeline.learning.learner_actor import Answer
from pipeline.progress.watch import Pulse

_PULSE_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_FIND_SECONDS = 3.0
"""Time between searches for a missing learner, as each asks the cluster's head."""
_BATCH_BYTES = 16 << 20
"""Most bytes of rows in transit to the learner; more follow once they have arrived."""


class LearningFeed:
    """Passes rows of an engine to a learner, and versions of the head to the engine.

    Args:
        find: Returns the current `LearnerActor`; None if there is none.
    """

    def __init__(self, lm: SpeculativeLM, find: Callable[[], Any | None], put: Callable[[Any], Any] = ray.put) -> None:
        assert isinstance(lm.samples, SampleTap)
        self._engine, self._samples, self._find, self._put = lm.engine, lm.samples, find, put
        self._learner: Any | None = None
        self._name = uuid.uuid4().hex
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
                self._call = self._give(self._learner, self._samples)
            answer: Answer = ray.get(self._call, timeout=_ANSWER_SECONDS)
            self._call = None
            self._pause(not answer.wants_rows)
            if answer.number is not None and answer.number != self._number:
                weights = ray.get(answer.weights[0], timeout=_ANSWER_SECONDS)
                self._number = answer.number
                self._offer(answer.number, weights)
        except ray.exceptions.GetTimeoutError:
            return  # the learner is being started, or has much to do: no other rows leave meanwhile
        except ray.exceptions.RayError:  # it has died, and it or another one perhaps comes back
            self._learner = self._call = None
            self._pause(True)
        except Exception as error:  # whatever it is, such as too little memory: the next exchange may go well
            print(f"nothing is exchanged with the learner for now: {one_line(error)}", file=sys.stderr, flush=True)
            self._learner = self._call = None
            self._pause(True)

    def _offer(self, number: int, weights: Mapping[str, Tensor]) -> None:
        try:
            self._engine.drafter.offer(number, weights)
        except Exception as error:  # such as too little memory, or weights of another shape
            print(f"version {number} is not taken: {one_line(error)}", file=sys.stderr, flush=True)

    def _give(self, learner: Any, samples: SampleTap) -> Any:
        state = self._engine.state()
        choices = tuple(choice for choice in state.choices if choice.members)
        beat = EngineBeat(state.output_tokens, state.row_steps, choices, state.busy_seconds)
        rows = samples.take(_BATCH_BYTES)
        return learner.exchange.remote(self._name, beat, [self._put(rows)] if rows else [])

    def _pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            (self._samples.pause if paused else self._samples.resume)()

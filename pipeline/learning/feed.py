"""An engine's link to the learner: progress and rows go there, versions of the head come back.

The link runs in its own thread. The engine never waits for it, and a failure costs drafts only.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray

from drafter.errors import one_line
from drafter.llm import SpeculativeLM
from drafter.methods.learning.rows import SampleTap
from drafter.statistics import BatchChoice
from pipeline.progress.watch import Pulse

_PULSE_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_FIND_SECONDS = 3.0  # time between searches for a missing learner, as each asks the cluster's head
_BATCH_BYTES = 16 << 20  # most bytes of rows in transit to the learner; more follow once they have arrived
_SILENT_SECONDS = 60.0  # an engine silent for this long counts as ended


@dataclass(frozen=True)
class EngineBeat:
    """Progress of an engine since its start, or of all engines in an interval."""

    tokens: int = 0
    row_steps: int = 0  # decode steps × rows in each
    choices: tuple[BatchChoice, ...] = ()
    busy: float = 0.0  # seconds with something to decode; of several engines, their mean


@dataclass(frozen=True)
class Answer:
    """The learner's reply to an engine. `weights` has one reference, not fetched by Ray in a tuple, or none."""

    wants_rows: bool
    number: int | None = None
    weights: tuple[ray.ObjectRef[Any], ...] = ()


class EngineBeats:
    """Adds up engines' progress. Times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[EngineBeat, float]] = {}
        self._sum = EngineBeat()

    def enter(self, engine: str, beat: EngineBeat, now: float) -> None:
        """Record an engine's progress.

        Its progress before its first beat is left out, because a restarted learner hears of engines' whole lives.
        """
        before, _ = self._heard.get(engine, (beat, now))
        self._sum = EngineBeat(
            tokens=self._sum.tokens + beat.tokens - before.tokens,
            row_steps=self._sum.row_steps + beat.row_steps - before.row_steps,
            busy=self._sum.busy + beat.busy - before.busy,
        )
        self._heard[engine] = beat, now

    def take(self, now: float) -> EngineBeat:
        """End an interval: return its sums, and forget silent engines."""
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[1] <= _SILENT_SECONDS}
        choices = tuple(choice for beat, _ in self._heard.values() for choice in beat.choices)
        done = replace(self._sum, choices=choices, busy=self._sum.busy / max(len(self._heard), 1))
        self._sum = EngineBeat()
        return done


class LearningFeed:
    """Passes rows of an engine to a learner, and versions of the head to the engine.

    `find` returns the current `LearnerActor`; None if there is none.
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
            self._engine.drafter.offer(number, weights)
        except Exception as error:  # such as too little memory, or weights of another shape
            print(f"version {number} is not taken: {one_line(error)}", file=sys.stderr, flush=True)

    def _give(self, learner: Any) -> Any:
        state = self._engine.state()
        choices = tuple(choice for choice in state.choices if choice.members)
        beat = EngineBeat(state.output_tokens, state.row_steps, choices, state.busy_seconds)
        rows = self._samples.take(_BATCH_BYTES)
        return learner.exchange.remote(self._name, beat, [self._put(rows)] if rows else [])

    def _pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            (self._samples.pause if paused else self._samples.resume)()

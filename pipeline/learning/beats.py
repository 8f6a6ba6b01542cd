"""Sums of engines' progress for the learner, and the learner's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter, Gauge

from drafter.statistics import BatchChoice
from pipeline.progress.board import LearningReport
from pipeline.progress.prometheus import begin

_SILENT_SECONDS = 60.0
"""An engine silent for this long counts as ended."""


@dataclass(frozen=True)
class EngineBeat:
    """An engine's progress since its start.

    Args:
        row_steps: Decode steps, counted once per participating row.
        busy: Seconds with something to decode.
    """

    tokens: int
    row_steps: int
    choices: tuple[BatchChoice, ...] = ()
    busy: float = 0.0


@dataclass(frozen=True)
class Decoded:
    """Progress of all engines in an interval.

    Args:
        row_steps: Decode steps, counted once per participating row.
        busy: Seconds with something to decode, the mean over engines.
    """

    tokens: int
    row_steps: int
    choices: tuple[tuple[BatchChoice, ...], ...] = ()
    busy: float = 0.0


@dataclass(frozen=True)
class _Heard:
    beat: EngineBeat
    at: float


class EngineBeats:
    """Adds up engines' progress. Times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._tokens = self._row_steps = 0
        self._busy = 0.0

    def enter(self, engine: str, beat: EngineBeat, now: float) -> None:
        """Record an engine's progress.

        Its progress before its first beat is left out, because a restarted learner hears of engines' whole lives.
        """
        known = self._heard.get(engine)
        before = beat if known is None else known.beat
        self._tokens += beat.tokens - before.tokens
        self._row_steps += beat.row_steps - before.row_steps
        self._busy += beat.busy - before.busy
        self._heard[engine] = _Heard(beat, now)

    def take(self, now: float) -> Decoded:
        """End an interval: return its sums, and forget silent engines."""
        self._heard = {name: one for name, one in self._heard.items() if now - one.at <= _SILENT_SECONDS}
        choices = tuple(one.beat.choices for one in self._heard.values() if one.beat.choices)
        done = Decoded(self._tokens, self._row_steps, choices, self._busy / max(len(self._heard), 1))
        self._tokens = self._row_steps = 0
        self._busy = 0.0
        return done


# Metrics for Prometheus; see `progress/prometheus.py`. Their descriptions must be ASCII.

_GAUGES = {
    "version": "Number of the newest version of the head that learns.",
    "beta": "Tokens per forward of the target model on held-out rows, with what the learner has learnt by now.",
    "published_beta": "Tokens per forward of the target model on held-out rows, with the newest version.",
    "loss": "Loss of the learner's newest step, in nats.",
    "rows": "Rows that the learner can learn from.",
    "bytes": "Bytes of the rows that the learner has.",
    "active": "1 while the learner works, 0 while it rests.",
    "taken_seconds": "Seconds by which learning has made decoding longer.",
    "saved_seconds": "Seconds by which what was learnt has made decoding shorter.",
}
_COUNTERS = {
    "steps": "Optimiser steps of the learner.",
    "seconds": "Seconds that the learner has worked.",
    "discarded": "Versions given up because their loss was not finite.",
    "dropped": "Batches of rows that the learner did not get to.",
}


class LearnerMetrics:
    """Exports a learner's state.

    Args:
        begun: The initial report. Earlier processes have exported its counts.
    """

    def __init__(self, run: str, begun: LearningReport) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(f"drafter_learner_{name}", what, ("run",)) for name, what in _GAUGES.items()}
        self._counters = {name: Counter(f"drafter_learner_{name}", what, ("run",)) for name, what in _COUNTERS.items()}
        self._published = _sums(begun)
        for counter in self._counters.values():
            begin(counter, self._tags)

    def publish(self, now: LearningReport) -> None:
        """Export the present state, and counts since the last call."""
        for name, value in _values(now).items():
            self._gauges[name].set(value, self._tags)  # None is not set
        for name, value in _sums(now).items():
            if (new := value - self._published[name]) > 0:
                self._counters[name].inc(new, self._tags)
                self._published[name] = value


def learner_families(now: LearningReport) -> list[Metric]:
    """Return the same metrics for a page that does not come from Ray; unknown values have no sample."""
    gauges, counters = _values(now), _sums(now)
    return [
        *(GaugeMetricFamily(f"drafter_learner_{name}", what, gauges[name]) for name, what in _GAUGES.items()),
        *(CounterMetricFamily(f"drafter_learner_{name}", what, counters[name]) for name, what in _COUNTERS.items()),
    ]


def _values(now: LearningReport) -> dict[str, float | None]:
    return {
        "version": now.version,
        "beta": now.beta,
        "published_beta": now.published_beta,
        "loss": now.loss,
        "rows": now.rows,
        "bytes": now.nbytes,
        "active": float(now.state == "learning"),
        "taken_seconds": now.taken_seconds,
        "saved_seconds": now.saved_seconds,
    }


def _sums(now: LearningReport) -> dict[str, float]:
    return {"steps": now.steps, "seconds": now.seconds, "discarded": now.discarded, "dropped": now.dropped}

"""Prometheus metrics of engines, rows, jobs and learners, through `ray.util.metrics`, which exports them on every node.

Ray puts `ray_` before the names and `_total` after those of counters, and adds labels of its own (`WorkerId` tells
engines apart). Acceptance rate and acceptance length are not exported: as ratios of counters in PromQL they are right
for any time and any set of engines. `docs/metrics.md` lists all names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter, Gauge, Histogram

from drafter.requests import FinishReason
from drafter.statistics import EngineState
from pipeline.errors import ProblemType
from pipeline.progress.board import LearningReport

TAGS = ("run", "model", "drafter")
"""Labels of an engine's metrics: a job's output or an endpoint's name, the model and the drafter."""

Fields = dict[str, tuple[str, str]]  # attribute of the exported state, and description in ASCII, by the metric's name
ENGINE_COUNTERS: Fields = {
    "steps": ("steps", "Decode steps of the engine: forwards of the target model over all active sequences."),
    "busy_seconds": ("busy_seconds", "Seconds in which the engine had something to decode."),
    "tokens": ("output_tokens", "New tokens."),
    "row_steps": ("row_steps", "Decode steps, counted once for each sequence that takes part."),
    "draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens that became output."),
}
ENGINE_GAUGES: Fields = {
    "slots": ("slots", "Sequences that can be decoded together."),
    "slots_active": ("active", "Sequences being decoded."),
    "requests_waiting": ("waiting", "Requests that wait for a slot."),
    "memory_tokens": ("memory_tokens", "Tokens of texts that the drafter remembers."),
    "memory_bytes": ("memory_bytes", "Bytes that its memory of them takes."),
}
_JOB_GAUGES: Fields = {
    "rows": ("total", "Rows of the input."),
    "rows_done": ("done", "Rows done by all submissions, errors included."),
    "rows_failed": ("failed", "Rows that could not be generated, in all submissions."),
    "engines": ("engines", "Engines at work."),
    "eta_seconds": ("eta_seconds", "Seconds until the job is done, at the rate of the last ten minutes."),
}
_LEARNER_GAUGES: Fields = {
    "version": ("version", "Number of the newest version of the head that learns."),
    "beta": (
        "beta",
        "Tokens per forward of the target model on held-out rows, with what the learner has learnt by now.",
    ),
    "published_beta": (
        "published_beta",
        "Tokens per forward of the target model on held-out rows, with the newest version.",
    ),
    "loss": ("loss", "Loss of the learner's newest step, in nats."),
    "rows": ("rows", "Rows that the learner can learn from."),
    "bytes": ("nbytes", "Bytes of the rows that the learner has."),
    "active": ("active", "1 while a head learns, 0 before and after."),
}
_LEARNER_COUNTERS: Fields = {
    "steps": ("steps", "Optimiser steps of the learner."),
    "seconds": ("seconds", "Seconds that the learner has worked."),
    "discarded": ("discarded", "Versions given up because their loss was not finite."),
    "dropped": ("dropped", "Batches of rows that the learner did not get to."),
}
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
_ROW_SECONDS = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


class StateMetrics:
    """Exports attributes of a state as gauges and counters. Earlier processes have exported the counts of `begun`."""

    def __init__(
        self, prefix: str, gauges: Fields, counters: Fields, tags: Mapping[str, str], begun: Any = None
    ) -> None:
        self._tags, labels = dict(tags), tuple(tags)
        self._gauges = {field: Gauge(f"{prefix}_{name}", what, labels) for name, (field, what) in gauges.items()}
        self._counters = {field: Counter(f"{prefix}_{name}", what, labels) for name, (field, what) in counters.items()}
        self._published = {field: 0.0 if begun is None else getattr(begun, field) for field in self._counters}
        for counter in self._counters.values():
            begin(counter, self._tags)

    def show(self, state: Any) -> None:
        """Export the present state, and counts since the last call.

        Call it every few seconds: gauges that are not set again disappear, as they should once a process has ended.
        """
        for field, gauge in self._gauges.items():
            gauge.set(getattr(state, field), self._tags)  # None is not set
        for field, counter in self._counters.items():
            self._count(counter, field, getattr(state, field), self._tags)

    def _count(self, counter: Counter, name: str, value: float, tags: dict[str, str]) -> None:
        if (new := value - self._published.get(name, 0.0)) > 0:
            counter.inc(new, tags)
            self._published[name] = value


class EngineMetrics(StateMetrics):
    """Exports an engine's counters and state; `tags` are values of `TAGS`."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        super().__init__("drafter", ENGINE_GAUGES, ENGINE_COUNTERS, tags)
        self._stages = Counter("drafter_stage_seconds", "Seconds of a step's stages.", (*TAGS, "stage"))

    def show(self, state: EngineState) -> None:
        super().show(state)
        for stage, seconds in state.stage_seconds.items():
            self._count(self._stages, f"stage_{stage}", seconds, {**self._tags, "stage": stage})


def job_metrics(run: str) -> StateMetrics:
    """Return what exports a job's `Progress`, from its driver; `run` is the job's output."""
    return StateMetrics("drafter_job", _JOB_GAUGES, {}, {"run": run})


def learner_metrics(run: str, begun: LearningReport) -> StateMetrics:
    return StateMetrics("drafter_learner", _LEARNER_GAUGES, _LEARNER_COUNTERS, {"run": run}, begun)


def learner_families(now: LearningReport) -> list[Metric]:
    """Return a learner's metrics for a page that does not come from Ray."""
    return families("drafter_learner", _LEARNER_GAUGES, _LEARNER_COUNTERS, now)


def families(prefix: str, gauges: Fields, counters: Fields, state: Any) -> list[Metric]:
    """Return attributes of a state as metrics for a page; unknown values have no sample."""
    return [
        family(f"{prefix}_{name}", what, getattr(state, field))
        for family, fields in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
        for name, (field, what) in fields.items()
    ]


def begin(counter: Counter, tags: Mapping[str, str]) -> None:
    """Export a counter at 0: `rate` in PromQL does not see the step to a counter's first value.

    It uses a private method of Ray's, because the public `inc` refuses 0.
    """
    counter._record(0.0, dict(tags))


class RowMetrics:
    """Counts the rows of a generation job as an engine finishes them; `tags` are values of `TAGS`."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = dict(tags)
        self._rows = Counter("drafter_rows", "Rows generated.", (*TAGS, "finish_reason"))
        self._errors = Counter("drafter_errors", "Rows that could not be generated.", (*TAGS, "type"))
        self._seconds = Histogram("drafter_row_seconds", "Seconds of a row in its slot.", _ROW_SECONDS, TAGS)
        for reason in _FINISH_REASONS:
            begin(self._rows, {**self._tags, "finish_reason": reason})
        for kind in get_args(ProblemType):
            begin(self._errors, {**self._tags, "type": kind})

    def generated(self, finish_reason: str, seconds: float) -> None:
        self._rows.inc(1, {**self._tags, "finish_reason": finish_reason})
        self._seconds.observe(seconds, self._tags)

    def failed(self, kind: ProblemType) -> None:
        self._errors.inc(1, {**self._tags, "type": kind})

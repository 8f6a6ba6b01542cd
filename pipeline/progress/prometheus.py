"""Prometheus metrics of engines, rows and jobs, through `ray.util.metrics`, which exports them on every node.

Ray puts `ray_` before the names and `_total` after those of counters, and adds labels of its own (`WorkerId` tells
engines apart). Acceptance rate and acceptance length are not exported: as ratios of counters in PromQL they are right
for any time and any set of engines. `docs/metrics.md` lists all names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from ray.util.metrics import Counter, Gauge, Histogram

from drafter.requests import FinishReason
from drafter.statistics import EngineState
from pipeline.errors import ProblemType
from pipeline.progress.board import Progress

TAGS = ("run", "model", "drafter")
"""Labels of an engine's metrics: a job's output or an endpoint's name, the model and the drafter."""
_COUNTERS = {
    "steps": ("steps", "Decode steps of the engine: forwards of the target model over all active sequences."),
    "busy_seconds": ("busy_seconds", "Seconds in which the engine had something to decode."),
    "tokens": ("output_tokens", "New tokens."),
    "row_steps": ("row_steps", "Decode steps, counted once for each sequence that takes part."),
    "draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens that became output."),
}
"""Field of `EngineState` and description by name."""
_GAUGES = {
    "slots": ("slots", "Sequences that can be decoded together."),
    "slots_active": ("active", "Sequences being decoded."),
    "requests_waiting": ("waiting", "Requests that wait for a slot."),
    "memory_tokens": ("memory_tokens", "Tokens of texts that the drafter remembers."),
    "memory_bytes": ("memory_bytes", "Bytes that its memory of them takes."),
}
_JOB_GAUGES = {
    "rows": "Rows of the input.",
    "rows_done": "Rows done by all submissions, errors included.",
    "rows_failed": "Rows that could not be generated, in all submissions.",
    "engines": "Engines at work.",
    "eta_seconds": "Seconds until the job is done, at the rate of the last ten minutes.",
}
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
_ROW_SECONDS = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


class EngineMetrics:
    """Exports an engine's counters and state."""

    def __init__(self, state: Callable[[], EngineState], tags: Mapping[str, str]) -> None:
        self._state, self._tags = state, dict(tags)
        self._counters = {name: Counter(f"drafter_{name}", what, TAGS) for name, (_, what) in _COUNTERS.items()}
        self._stages = Counter("drafter_stage_seconds", "Seconds of a step's stages.", (*TAGS, "stage"))
        self._gauges = {name: Gauge(f"drafter_{name}", what, TAGS) for name, (_, what) in _GAUGES.items()}
        self._published: dict[str, float] = {}
        for counter in self._counters.values():
            begin(counter, self._tags)

    def publish(self) -> None:
        """Export counts since the last call, and the present state.

        Call it every few seconds: gauges that are not set again disappear, as they should once an engine has ended.
        """
        state = self._state()
        for name, counter in self._counters.items():
            self._count(counter, name, getattr(state, _COUNTERS[name][0]), self._tags)
        for stage, seconds in state.stage_seconds.items():
            self._count(self._stages, f"stage_{stage}", seconds, {**self._tags, "stage": stage})
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, _GAUGES[name][0]), self._tags)

    def _count(self, counter: Counter, name: str, value: float, tags: dict[str, str]) -> None:
        if (new := value - self._published.get(name, 0.0)) > 0:
            counter.inc(new, tags)
            self._published[name] = value


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


class JobMetrics:
    """Exports a job's progress, from its driver; `run` is the job's output."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(f"drafter_job_{name}", what, ("run",)) for name, what in _JOB_GAUGES.items()}

    def show(self, now: Progress) -> None:
        values = {
            "rows": now.total,
            "rows_done": now.done,
            "rows_failed": now.errors_before + now.errors,
            "engines": now.engines,
            "eta_seconds": now.eta_seconds,
        }
        for name, value in values.items():
            self._gauges[name].set(value, self._tags)  # None is not set

"""Metrics of a learner for Prometheus; see `progress/prometheus.py`. Their descriptions must be ASCII."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter, Gauge

from pipeline.progress.prometheus import begin
from pipeline.progress.reports import LearningReport

_GAUGES = {
    "version": "Number of the newest version of the head that learns.",
    "beta": "Tokens per base forward on held-out rows, with what the learner has learnt by now.",
    "published_beta": "Tokens per base forward on held-out rows, with the newest version.",
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
    """Exports what a learner does.

    Args:
        run: A job's output, or what an endpoint calls its model.
        begun: What the learner goes on from: what earlier processes have done, they have exported.
    """

    def __init__(self, run: str, begun: LearningReport) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(f"drafter_learner_{name}", what, ("run",)) for name, what in _GAUGES.items()}
        self._counters = {name: Counter(f"drafter_learner_{name}", what, ("run",)) for name, what in _COUNTERS.items()}
        self._published = _sums(begun)
        for counter in self._counters.values():
            begin(counter, self._tags)

    def publish(self, now: LearningReport) -> None:
        """Export the present state, and what was counted since the last call."""
        for name, value in _values(now).items():
            self._gauges[name].set(value, self._tags)  # None is not set
        for name, value in _sums(now).items():
            if (new := value - self._published[name]) > 0:
                self._counters[name].inc(new, self._tags)
                self._published[name] = value


def learner_families(now: LearningReport) -> list[Metric]:
    """Return the same for a page of metrics that does not come from Ray; what is not known yet has no sample."""
    gauges, counters = _values(now), _sums(now)
    return [
        *(GaugeMetricFamily(f"drafter_learner_{name}", what, gauges[name]) for name, what in _GAUGES.items()),
        *(CounterMetricFamily(f"drafter_learner_{name}", what, counters[name]) for name, what in _COUNTERS.items()),
    ]


def _values(now: LearningReport) -> dict[str, float | None]:
    """Values of the gauges."""
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
    """Values of the counters."""
    return {"steps": now.steps, "seconds": now.seconds, "discarded": now.discarded, "dropped": now.dropped}

"""Metrics of a job's learner for Prometheus; see `progress/prometheus.py`. Their descriptions must be ASCII."""

from __future__ import annotations

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
    "taken_seconds": "Seconds by which learning has made the job longer.",
    "saved_seconds": "Seconds by which what was learnt has made the job shorter.",
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
        run: The job's output.
        begun: What the learner goes on from: what earlier processes have done, they have exported.
    """

    def __init__(self, run: str, begun: LearningReport) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(f"drafter_learner_{name}", what, ("run",)) for name, what in _GAUGES.items()}
        self._counters = {name: Counter(f"drafter_learner_{name}", what, ("run",)) for name, what in _COUNTERS.items()}
        self._published = _sums(begun, dropped=0)
        for counter in self._counters.values():
            begin(counter, self._tags)

    def publish(self, now: LearningReport, dropped: int) -> None:
        """Export the present state, and what was counted since the last call.

        Args:
            now: What the learner does.
            dropped: Batches of rows that its process has dropped.
        """
        values = {
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
        for name, value in values.items():
            self._gauges[name].set(value, self._tags)  # None is not set
        for name, value in _sums(now, dropped).items():
            if (new := value - self._published[name]) > 0:
                self._counters[name].inc(new, self._tags)
                self._published[name] = value


def _sums(now: LearningReport, dropped: int) -> dict[str, float]:
    """Values of the counters."""
    return {"steps": now.steps, "seconds": now.seconds, "discarded": now.discarded, "dropped": dropped}

"""What Prometheus can see of the replicas, as one page that any ingress can give.

Each replica counts for itself; the ingress asks all of them and puts their figures side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from drafter.requests import Generation
from drafter.statistics import EngineState, mean_acceptance_length

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)


@dataclass(frozen=True)
class Snapshot:
    """A replica's figures at one moment.

    Args:
        replica: Its name.
        families: All metrics, without labels that tell the replica.
    """

    replica: str
    families: list[Metric]


class ReplicaMetrics:
    """Counts what a replica's requests come to."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("drafter_requests", "Texts generated.", ["finish_reason"], registry=registry)
        self._failures = Counter("drafter_request_failures", "Requests that failed.", ["error"], registry=registry)
        self._prompt_tokens = Counter("drafter_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._draft_tokens = Counter("drafter_draft_tokens", "Draft tokens verified.", registry=registry)
        self._accepted_tokens = Counter(
            "drafter_accepted_tokens", "Draft tokens that became output.", registry=registry
        )
        self._length = Histogram(
            "drafter_mean_acceptance_length",
            "Tokens a forward of the base, over a request: β.",
            buckets=_LENGTHS,
            registry=registry,
        )
        self._queue = Histogram(
            "drafter_queue_seconds", "Seconds until a request entered a slot.", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "drafter_time_to_first_token_seconds",
            "Seconds until a request's first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "drafter_time_per_output_token_seconds",
            "Seconds a token after a request's first one.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def finished(self, generation: Generation) -> None:
        """Count a request that has come to its end."""
        counts, timing = generation.counts, generation.timing
        self._requests.labels(generation.finish_reason).inc()
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._draft_tokens.inc(counts.num_draft_tokens)
        self._accepted_tokens.inc(counts.num_accepted_draft_tokens)
        if timing.queued is not None:
            self._queue.observe(timing.queued)
        if timing.first_token is not None:
            self._length.observe(mean_acceptance_length(counts))
            self._first_token.observe(timing.first_token)
            if len(generation.token_ids) > 1:
                self._per_token.observe((timing.total - timing.first_token) / (len(generation.token_ids) - 1))

    def failed(self, error: str) -> None:
        """Count a request that ended with an error of this name."""
        self._failures.labels(error).inc()

    def snapshot(self, replica: str, state: EngineState) -> Snapshot:
        """All figures of the replica of this name; `state` is its engine's."""
        stages = CounterMetricFamily("drafter_stage_seconds", "Seconds of a step's stages.", labels=["stage"])
        for stage, seconds in state.stage_seconds.items():
            stages.add_metric([stage], seconds)
        engine: list[Metric] = [
            GaugeMetricFamily("drafter_slots", "Requests that can be decoded together.", state.slots),
            GaugeMetricFamily("drafter_slots_active", "Requests being decoded.", state.active),
            GaugeMetricFamily("drafter_requests_waiting", "Requests that wait for a slot.", state.waiting),
            CounterMetricFamily("drafter_steps", "Decode steps of the engine.", state.steps),
            CounterMetricFamily("drafter_row_steps", "Decode steps of single requests.", state.row_steps),
            CounterMetricFamily("drafter_tokens", "New tokens.", state.output_tokens),
            CounterMetricFamily("drafter_prefilled_tokens", "Tokens of prompts read.", state.prefilled_tokens),
            CounterMetricFamily("drafter_shared_tokens", "Tokens of prompts known already.", state.shared_tokens),
            stages,
        ]
        return Snapshot(replica, [*engine, *self._registry.collect()])


def metrics_page(snapshots: Sequence[tuple[dict[str, str], Snapshot]]) -> bytes:
    """The replicas' figures in Prometheus's text format.

    Args:
        snapshots: Each with the labels that tell it from others.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(snapshots))
    return generate_latest(registry)


class _Merged:
    """One family of each name, with the samples of all replicas."""

    def __init__(self, snapshots: Sequence[tuple[dict[str, str], Snapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for labels, snapshot in self._snapshots:
            for family in snapshot.families:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [
                    sample._replace(labels=sample.labels | labels)
                    for sample in family.samples
                    if not sample.name.endswith("_created")  # of no use, and as many again
                ]
        yield from merged.values()

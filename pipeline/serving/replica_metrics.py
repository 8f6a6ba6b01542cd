"""What a replica tells Prometheus: how its requests end, and its engine's counters."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily

from drafter.requests import Generation
from drafter.statistics import EngineState, mean_acceptance_length
from pipeline.progress.prometheus import ENGINE_COUNTERS, ENGINE_GAUGES, families
from pipeline.serving.handles import Snapshot

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_GAUGES = ENGINE_GAUGES | {"version": ("drafter_version", "Number of the version of the head that drafts.")}
_COUNTERS = {name: ENGINE_COUNTERS[name] for name in ("steps", "row_steps", "tokens")} | {
    "prefilled_tokens": ("prefilled_tokens", "Tokens of prompts that were prefilled."),
    "shared_tokens": ("shared_tokens", "Tokens of prompts that were in the KV cache already."),
}
_LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)


class ReplicaMetrics:
    """Counts how a replica's requests end; adds the engine's counters at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        self._requests = counter("drafter_requests", "Texts generated.", ["finish_reason"])
        self._failures = counter("drafter_request_failures", "Requests that failed.", ["error"])
        self._prompt_tokens = counter("drafter_prompt_tokens", "Tokens of prompts.")
        self._draft_tokens = counter("drafter_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = counter("drafter_accepted_tokens", "Draft tokens that became output.")
        length = "New tokens per forward of the target model, over a request: β."
        self._length = histogram("drafter_mean_acceptance_length", length, buckets=_LENGTHS)
        queue = "Seconds until a request entered a slot."
        self._queue = histogram("drafter_queue_seconds", queue, buckets=_SECONDS)
        first = "Seconds until a request's first token."
        self._first_token = histogram("drafter_time_to_first_token_seconds", first, buckets=_SECONDS)
        per_token = "Seconds per token after a request's first one."
        self._per_token = histogram("drafter_time_per_output_token_seconds", per_token, buckets=_TOKEN_SECONDS)

    def finished(self, generation: Generation) -> None:
        counts, timing = generation.counts, generation.timing
        self._requests.labels(generation.finish_reason).inc()
        self._prompt_tokens.inc(generation.num_prompt_tokens)
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
        self._failures.labels(error).inc()

    def snapshot(self, replica: str, state: EngineState) -> Snapshot:
        stages = CounterMetricFamily("drafter_stage_seconds", "Seconds in each stage of a step.", labels=["stage"])
        for stage, seconds in state.stage_seconds.items():
            stages.add_metric([stage], seconds)
        engine = families("drafter", _GAUGES, _COUNTERS, state)
        return Snapshot(replica, [*engine, stages, *self._registry.collect()])

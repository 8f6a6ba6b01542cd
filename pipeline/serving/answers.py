"""Turns calls into engine requests and generated tokens into answers; counts both for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from drafter.engine.sequence import Handle
from drafter.errors import (
    EngineError,
    NotFiniteError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request, TokenDelta, sampling_defaults
from drafter.statistics import EngineState, mean_acceptance_length
from drafter.text.tokenizers import refuse_long
from pipeline.io.staging import sample_seed
from pipeline.openai.answers import (
    FIELD,
    LogprobsOf,
    chat_logprobs,
    chat_response,
    completion_logprobs,
    completion_response,
    echoed,
    generation_statistics,
    long_answer,
    lossless_mark,
    token_text,
)
from pipeline.openai.requests import OpenAIError, Prompt, is_messages, not_finite, to_json
from pipeline.openai.stream_events import ChatChunks, Chunks, CompletionChunks, error_event
from pipeline.serving.http.work_limits import LargeWork
from pipeline.serving.messages import Call, Failure, Reply, Snapshot, interrupted, overloaded

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)


class ReplicaMetrics:
    """Counts how a replica's requests end; adds the engine's counters at each scrape."""

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
            "New tokens per forward of the target model, over a request: β.",
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
            "Seconds per token after a request's first one.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

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
        gauges = (
            ("drafter_slots", "Requests that can be decoded together.", state.slots),
            ("drafter_slots_active", "Requests being decoded.", state.active),
            ("drafter_requests_waiting", "Requests that wait for a slot.", state.waiting),
            ("drafter_memory_tokens", "Tokens of texts that the drafter remembers.", state.memory_tokens),
            ("drafter_memory_bytes", "Bytes that its memory of them takes.", state.memory_bytes),
            ("drafter_version", "Number of the version of the head that drafts.", state.drafter_version),
        )
        counters = (
            ("drafter_steps", "Decode steps of the engine.", state.steps),
            ("drafter_row_steps", "Decode steps, counted once for each request that took part.", state.row_steps),
            ("drafter_tokens", "New tokens.", state.output_tokens),
            ("drafter_prefilled_tokens", "Tokens of prompts that were prefilled.", state.prefilled_tokens),
            ("drafter_shared_tokens", "Tokens of prompts that were in the KV cache already.", state.shared_tokens),
        )
        engine: list[Metric] = [
            *(GaugeMetricFamily(*gauge) for gauge in gauges),
            *(CounterMetricFamily(*counter) for counter in counters),
            stages,
        ]
        return Snapshot(replica, [*engine, *self._registry.collect()])


# Answers: no Ray, no HTTP.

_STALLED_SECONDS = 300.0
"""Seconds after which a step counts as hung."""
_EVENTS_PER_SECOND = 30.0 * (os.cpu_count() or 1)
"""Most events of all streams together. Each event wakes a dozen threads and, on shared cores, interrupts the engine:
more events would cost more time than the tokens take.
"""

logger = logging.getLogger("ray.serve")

_LARGEST_MESSAGE = 1 << 19
"""Characters of a reply. Ray Serve's messages may have up to 4 MiB, and a character up to four bytes."""
_LARGE_PROMPT = 32 << 10
"""Prompts from this many characters on are encoded one at a time."""
_MESSAGE = 64
"""Characters that are as much work as a message by itself."""
_REST = 3.0
"""Pause between two pieces of a long answer, for each second that a piece took."""

Arrival = tuple[int, TokenDelta | Generation | Exception]
"""Output of a choice: its index, and the tokens of a step, its end, or an error."""


class Answers:
    """Answers calls with one engine.

    Args:
        lm: The engine, whose thread schedules all requests that come here.
        name: The replica's name.
        seconds: How long a request may take.
        special_tokens: Whether the text of a special token in a message is that token; by default it is text.
    """

    def __init__(self, lm: SpeculativeLM, name: str, seconds: float, *, special_tokens: bool = False) -> None:
        self._lm, self._name, self._seconds, self._special_tokens = lm, name, seconds, special_tokens
        self._metrics, self._large_work = ReplicaMetrics(), LargeWork()
        given = lm.base.generation_settings
        longest = given.get("max_new_tokens") or lm.max_length
        self._defaults = replace(sampling_defaults(given, lm.base.name, drawn=True), max_new_tokens=longest)
        self._token_text = cache(partial(token_text, lm.tokenizer))

    async def chat(self, call: Call) -> AsyncIterator[Reply]:
        """Answer a request to `/v1/chat/completions`."""
        async for reply in self._answer(call, "chatcmpl", chat_response, chat_logprobs, ChatChunks):
            yield reply

    async def completions(self, call: Call) -> AsyncIterator[Reply]:
        """Answer a request to `/v1/completions`."""
        async for reply in self._answer(call, "cmpl", completion_response, completion_logprobs, CompletionChunks):
            yield reply

    def snapshot(self) -> Snapshot:
        """Return the replica's metrics.

        Raises:
            EngineError: As in `check_health`.
        """
        self.check_health()
        return self._metrics.snapshot(self._name, self._lm.engine.state())

    def check_health(self) -> None:
        """Check that the engine can answer.

        Raises:
            EngineError: It has failed or hangs.
        """
        engine = self._lm.engine
        if engine.failure is not None:
            raise engine.failure
        if not engine.idle and time.monotonic() - engine.last_step > _STALLED_SECONDS:
            raise EngineError(f"a step has taken more than {_STALLED_SECONDS:g} seconds")

    async def _answer(
        self,
        call: Call,
        kind: str,
        respond: Callable[..., dict[str, Any]],
        logprobs_of: LogprobsOf,
        chunks: type[Chunks],
    ) -> AsyncIterator[Reply]:
        handles: list[Handle] = []
        sent = False
        name, created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        request = call.request
        try:
            do = self._large_work.run if _characters(request.prompts) > _LARGE_PROMPT else asyncio.to_thread
            for each in await do(self._requests, call):
                handles.append(self._lm.submit(each, stream=request.stream))
            if request.stream:
                stream = chunks(request, name, created, self._token_text, speculation=call.speculation)
                async for events in self._stream(stream, handles, apart=request.wants_logprobs):
                    for part in _messages(events):
                        yield part
                        sent = True
            else:
                generations = [self._finished(await handle.outcome()) for handle in handles]
                if request.echo:
                    prompts = (self._text(prompt) for prompt in request.prompts for _ in range(request.n))
                    generations = [echoed(one, prompt) for one, prompt in zip(generations, prompts, strict=True)]
                short = [replace(generation, logprobs=None) for generation in generations]
                body = respond(request, short, name, created, self._token_text) | lossless_mark(*generations)
                if call.speculation:
                    body[FIELD] = [generation_statistics(generation) for generation in generations]
                if request.wants_logprobs:
                    text = await _written(long_answer(body, generations, logprobs_of, self._token_text))
                else:
                    text = to_json(body)
                for part in _messages(text):
                    yield part
        except Exception as error:
            # Once a chunk is out so is the status: then the stream itself must say that it failed.
            told = self._told(error)
            yield error_event(told) if sent else Failure.of(told)
        finally:
            # However this ended, none of its requests keeps a slot: the client may have left.
            for handle in handles:
                handle.cancel()

    async def _stream(self, chunks: Chunks, handles: list[Handle], *, apart: bool) -> AsyncIterator[str]:
        """Yield the events of all choices as they come, batched where several are ready."""
        arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(index, handle, arrived)) for index, handle in enumerate(handles)]
        finished: dict[int, Generation] = {}
        begun: set[int] = set()

        def events_of(arrivals: list[Arrival]) -> str:
            events = ""
            for index, arrival in arrivals:
                if isinstance(arrival, Exception):
                    raise arrival
                if index not in begun:
                    begun.add(index)
                    events += chunks.begin(index)
                if isinstance(arrival, TokenDelta):
                    events += chunks.step(index, arrival)
                else:
                    finished[index] = self._finished(arrival)
                    events += chunks.finish(index, arrival)
            if len(finished) == len(handles):
                events += chunks.end([finished[index] for index in range(len(handles))])
            return events

        try:
            while len(finished) < len(handles):
                arrivals = [await arrived.get()]
                while not arrived.empty():
                    arrivals.append(arrived.get_nowait())
                yield await asyncio.to_thread(events_of, arrivals) if apart else events_of(arrivals)
        finally:
            for reader in readers:
                reader.cancel()

    async def _read(self, index: int, handle: Handle, arrived: asyncio.Queue[Arrival]) -> None:
        outcome = asyncio.ensure_future(handle.outcome())
        try:
            async for deltas in handle.arrivals():
                for delta in deltas:
                    if delta.token_ids:  # a step whose numbers are not finite adds none
                        arrived.put_nowait((index, delta))
                await asyncio.wait([outcome], timeout=self._lm.engine.state().active / _EVENTS_PER_SECOND)
            arrived.put_nowait((index, await outcome))
        except Exception as error:  # whoever reads the queue must hear of it, whatever it is
            arrived.put_nowait((index, error))
        finally:
            outcome.cancel()

    def _requests(self, call: Call) -> list[Request]:
        """Return a request of the engine for each choice.

        Raises:
            OpenAIError: A prompt or a setting cannot be used.
        """
        request = call.request
        settings = {"seed": secrets.randbits(63), **request.settings}  # without a seed, each answer has its own
        sampling = replace(request, settings=settings).sampling(self._defaults)
        requests = []
        for prompt in request.prompts:
            # Token ids are taken as they are.
            ids = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else self._encode(prompt)
            refuse_long(len(ids), self._lm.max_length)
            for choice in range(request.n):
                own = replace(sampling, seed=sample_seed(sampling.seed, choice))
                scored = own.logprobs if request.echo else None
                requests.append(Request(ids, own, "", self._seconds, scored, may_teach=call.may_teach))
        return requests

    def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else str(self._lm.tokenizer.decode(prompt))

    def _encode(self, prompt: Any) -> list[int]:
        return self._lm.encode(prompt, special_tokens=self._special_tokens)

    def _finished(self, generation: Generation) -> Generation:
        self._metrics.finished(generation)
        return generation

    def _told(self, error: Exception) -> OpenAIError:
        """Return what the client is told of an error: details only of the client's own mistakes."""
        self._metrics.failed(type(error).__name__)
        match error:
            case OpenAIError():
                return error
            case RequestTimeoutError():
                return OpenAIError(408, f"The request took longer than {self._seconds:g} seconds.", code="timeout")
            case NotFiniteError():
                logger.error("A request failed: %s", error)
                return not_finite()
            case PromptTooLongError():
                return OpenAIError(400, f"Invalid request: {error}.", code="context_length_exceeded")
            case RequestError():
                return OpenAIError(400, f"Invalid request: {error}.", code="invalid_value")
            case QueueFullError():
                return overloaded()
            case EngineError():
                return interrupted()
        logger.exception("A request failed")
        return OpenAIError(500, "The server had an error.", code="internal_error")


def _characters(prompts: Sequence[Prompt]) -> int:
    count = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            count += len(prompt)
        elif is_messages(prompt):
            count += sum(_MESSAGE + len(message["content"]) for message in prompt)
    return count


def _messages(text: str) -> Iterator[str]:
    for start in range(0, len(text), _LARGEST_MESSAGE):
        yield text[start : start + _LARGEST_MESSAGE]


async def _written(pieces: Iterator[str]) -> str:
    text: list[str] = []
    while True:
        begun = time.monotonic()
        piece = await asyncio.to_thread(next, pieces, None)
        if piece is None:
            return "".join(text)
        text.append(piece)
        await asyncio.sleep(_REST * (time.monotonic() - begun))

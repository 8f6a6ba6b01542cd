"""Ray Serve deployments that wrap one engine, which answers calls, and the endpoint's learner."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import ray
from ray import serve

from drafter.engine.handle import Handle
from drafter.errors import (
    EngineError,
    NotFiniteError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from drafter.llm import SpeculativeLM
from drafter.prompt import Prompt as EncodedPrompt
from drafter.requests import Generation, Request, TokenDelta, sampling_defaults
from drafter.salted import kept_for
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import forget_words, refuse_long
from pipeline.cluster.ray_cluster import LOOPBACK
from pipeline.engines.models import EngineSpec
from pipeline.learning.config import LearnerSpec
from pipeline.learning.job_learner import WatchedLearner, find_learner
from pipeline.openai.answers import (
    FIELD,
    Chunks,
    answer_id,
    echoed,
    error_event,
    generation_statistics,
    long_answer,
    lossless_mark,
    response,
    token_text,
)
from pipeline.openai.errors import OpenAIError, not_finite, server_error, to_json
from pipeline.openai.requests import ParsedRequest, Prompt, refused
from pipeline.progress.board import LearningReport
from pipeline.progress.watch import Pulse
from pipeline.serving.config import EdgeConfig
from pipeline.serving.edge_sessions import EdgeHost
from pipeline.serving.handles import (
    Call,
    Device,
    Failure,
    Reply,
    Snapshot,
    interrupted,
    keep_to_this_machine,
    overloaded,
)
from pipeline.serving.images import ChatImages
from pipeline.serving.replica_metrics import ReplicaMetrics
from pipeline.serving.work_limits import LargeWork
from pipeline.settings import ImagesConfig

_ASK_SECONDS = 1.0
_NAME_SECONDS = 0.2
_TRIES = 150
_STALLED_SECONDS = 300.0  # seconds after which a step counts as hung
_EVENTS_PER_SECOND = 30.0 * (os.cpu_count() or 1)
"""Most events of all streams together. Each wakes a dozen threads and, on shared cores, interrupts the engine."""
_LARGEST_MESSAGE = 1 << 19
"""Characters of a reply. Ray Serve's messages may have up to 4 MiB, and a character up to four bytes."""
_LARGE_PROMPT = 2 << 10
"""Prompts above this many characters are encoded one at a time. Others take up to four milliseconds."""
_MESSAGE = 64  # characters that are as much work as a message by itself
_TOKEN_TEXTS = 1 << 16  # texts of tokens that are kept, for each client apart
_REST = 3.0  # pause between two pieces of a long answer, for each second that a piece took


logger = logging.getLogger("ray.serve")

Arrival = tuple[int, TokenDelta | Generation | Exception]
"""Output of a choice: its index, and the tokens of a step, its end, or an error."""


class Answers:
    """Answers calls with one engine, whose thread schedules all requests.

    Args:
        name: The replica's name.
        seconds: Longest time of a request.
        edge: Limits of devices' sessions.
        images: Limits on images, and the hosts that they may be fetched from.
        address: Where it listens for what the ingress carries for these.
        special_tokens: Whether the text of a special token in a message is that token; by default it is text.
    """

    def __init__(
        self,
        lm: SpeculativeLM,
        name: str,
        seconds: float,
        edge: EdgeConfig | None = None,
        images: ImagesConfig | None = None,
        *,
        address: str = LOOPBACK,
        special_tokens: bool = False,
    ) -> None:
        self._lm, self._name, self._seconds, self._special_tokens = lm, name, seconds, special_tokens
        processor = lm.processor if lm.base.sight is not None else None
        self._images = ChatImages(images or ImagesConfig(), processor)
        self._metrics, self._large_work = ReplicaMetrics(), LargeWork()
        self._compiling = LargeWork(lm.engine.guides.spent, lm.engine.guides.stop)
        given = lm.base.generation_settings
        longest = given.get("max_new_tokens") or lm.max_length
        self._defaults = replace(sampling_defaults(given, lm.base.name, drawn=True), max_new_tokens=longest)
        self._token_text = lru_cache(_TOKEN_TEXTS)(lambda client, token: token_text(lm.tokenizer, token))
        self._edge = EdgeHost(
            lm, edge or EdgeConfig(), address, self._encoded, self._metrics.finished, self._client_error
        )

    def snapshot(self) -> Snapshot:
        """Return the replica's metrics; raises as `check_health` does."""
        self.check_health()
        found = self._metrics.snapshot(self._name, self._lm.engine.state())
        return replace(found, families=[*found.families, *self._edge.families()])

    async def host(self, device: Device) -> AsyncIterator[str]:
        """Make a place for a device's session; see `EdgeHost.host`."""
        async with aclosing(self._edge.host(device)) as place:
            async for address in place:
                yield address

    def check_health(self) -> None:
        """Raise an `EngineError` if the engine has failed or hangs; Ray Serve then replaces the replica."""
        engine = self._lm.engine
        if engine.failure is not None:
            raise engine.failure
        if not engine.idle and time.monotonic() - engine.last_step > _STALLED_SECONDS:
            raise EngineError(f"a step has taken more than {_STALLED_SECONDS:g} seconds")

    async def answer(self, call: Call) -> AsyncIterator[Reply]:
        """Answer a request: yield a failure, or the parts of a stream's events or of a JSON body."""
        handles: list[Handle] = []
        sent = False
        requests: list[Request] = []
        request = call.request
        name, created = answer_id(request, uuid.uuid4().hex), int(time.time())
        try:
            queue = self._lm.engine.scheduler.queue(background=call.background)
            queue.refuse_full(call.client)  # before any work is done for it
            request = request.for_model(self._lm.tokenizer)
            call = replace(call, request=request)
            requests = await self._encoded(call)
            for each in requests:
                handles.append(self._lm.submit(each, stream=request.stream))
            if request.stream:
                texts = partial(self._token_text, call.client)
                prompts = [each.prompt_ids for each in requests]
                chunks = Chunks(request, name, created, texts, speculation=call.speculation, prompts=prompts)
                async for events in self._stream(chunks, handles, apart=request.wants_logprobs):
                    for part in _messages(events):
                        yield part
                        sent = True
            else:
                for part in _messages(await self._body(call, handles, name, created)):
                    yield part
        except Exception as error:
            # Once a chunk is out so is the status: then the stream itself must say that it failed.
            refusal = self._client_error(error, request)
            yield error_event(refusal) if sent else Failure.of(refusal)
        finally:
            # However this ended, none of its requests keeps a slot: the client may have left.
            for handle in handles:
                handle.cancel()
            await self._images.forget(call.turns, requests)

    async def _encoded(self, call: Call) -> list[Request]:
        """Return a request of the engine for each choice, which the event loop may submit: what it asks is compiled."""
        images = await self._images.fetched(call.request.images, call.turns)
        make = partial(self._requests, call, images)
        if images:
            requests = await self._images.run(call.turns, make)
        elif _characters(call.request.prompts) > _LARGE_PROMPT:
            requests = await self._large_work.run(call.turns, make)
        else:
            requests = await asyncio.to_thread(make)
        asked, guides = requests[0].sampling.structured_outputs, self._lm.engine.guides  # the same of all of them
        try:
            if asked is not None and not guides.ready(asked, call.client):
                prompt = requests[0].prompt_ids
                await self._compiling.run(call.turns, partial(guides.guide, asked, prompt, call.client))
        except BaseException:
            await self._images.forget(call.turns, requests)
            raise
        return requests

    async def _body(self, call: Call, handles: list[Handle], name: str, created: int) -> str:
        request = call.request
        generations = await asyncio.gather(*(handle.outcome() for handle in handles))
        generations = [self._finished(generation) for generation in generations]
        if request.scored is not None:  # the first choice of each prompt has been
            scores = [one.prompt_logprobs for one in generations[:: request.n] for _ in range(request.n)]
            generations = [replace(one, prompt_logprobs=of) for one, of in zip(generations, scores, strict=True)]
        if request.echo:
            said = (self._text(prompt) for prompt in request.prompts for _ in range(request.n))
            count = handles[0].request.sampling.logprobs
            generations = [echoed(one, prompt, count) for one, prompt in zip(generations, said, strict=True)]
        short = [replace(generation, logprobs=None) for generation in generations]
        texts, prompts = partial(self._token_text, call.client), [handle.request.prompt_ids for handle in handles]
        body = response(request, short, name, created, texts, prompts) | lossless_mark(*generations)
        if call.speculation:
            body[FIELD] = [generation_statistics(generation) for generation in generations]
        if not request.wants_logprobs:
            return to_json(body)
        return await _written(long_answer(body, generations, request, texts))

    async def _stream(self, chunks: Chunks, handles: list[Handle], *, apart: bool) -> AsyncIterator[str]:
        """Yield the events of all choices as they come, batched where several are ready."""
        arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(index, handle, arrived)) for index, handle in enumerate(handles)]
        finished: dict[int, Generation] = {}

        def events_of(arrivals: list[Arrival]) -> str:
            events = ""
            for index, arrival in arrivals:
                if isinstance(arrival, Exception):
                    raise arrival
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
        except Exception as error:  # of any kind: it ends the stream
            arrived.put_nowait((index, error))
        finally:
            outcome.cancel()

    def _requests(self, call: Call, images: Sequence[str | bytes] = ()) -> list[Request]:
        """Return a request of the engine for each choice. `images` are those of the chat, in order."""
        request = call.request
        settings = {"seed": secrets.randbits(63), **request.settings}  # without a seed, each answer has its own
        sampling = replace(request, settings=settings).sampling(self._defaults)
        forget_words(self._lm.tokenizer)
        with kept_for(call.client):
            prompts = [self._prompt(prompt, images) for prompt in request.prompts]
        requests = []
        for ids in prompts:
            for choice in range(request.n):
                own = replace(sampling, seed=request.seed_of(choice, sampling.seed))
                scored = None if choice else request.scored
                # A row in the background may wait for as long as there are live ones; its batch has its own deadline.
                seconds = None if call.background else self._seconds
                made = Request(ids, own, "", seconds, scored, may_teach=call.may_teach, salt=call.client)
                requests.append(replace(made, background=call.background))
        return requests

    def _prompt(self, prompt: Prompt, images: Sequence[str | bytes]) -> Any:
        encode = partial(self._lm.encode, special_tokens=self._special_tokens)
        ids: Any = prompt
        if isinstance(prompt, str):
            ids = encode(prompt)
        elif isinstance(prompt, Conversation):
            ids = encode(prompt, images=images, limits=self._images.limits)
        refuse_long(len(ids.ids if isinstance(ids, EncodedPrompt) else ids), self._lm.max_length)
        return ids

    def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else str(self._lm.tokenizer.decode(prompt))

    def _finished(self, generation: Generation) -> Generation:
        self._metrics.finished(generation)
        return generation

    def _client_error(self, error: Exception, request: ParsedRequest | None = None) -> OpenAIError:
        """The error as clients see it: with details only of their own mistakes."""
        self._metrics.failed(type(error).__name__)
        match error:
            case OpenAIError():
                return error
            case RequestTimeoutError():
                return OpenAIError(408, f"The request took longer than {self._seconds:g} seconds.", code="timeout")
            case NotFiniteError():
                logger.error("A request failed: %s", error)
                return not_finite()
            case RequestError():
                return refused(error, request)
            case QueueFullError():
                return overloaded()
            case EngineError():
                return interrupted()
        logger.exception("A request failed")
        return server_error()


def _characters(prompts: Sequence[Prompt]) -> int:
    count = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            count += len(prompt)
        elif isinstance(prompt, Conversation):
            count += sum(_MESSAGE + len(repr(message)) for message in prompt.messages)
            count += len(repr((prompt.tools, prompt.documents, prompt.chat_template_kwargs)))
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


class EngineReplica(Answers):
    """One engine in a process of its own, with as many threads as the replica has cores."""

    def __init__(
        self, spec: EngineSpec, seconds: float, edge: EdgeConfig, images: ImagesConfig, *, special_tokens: bool
    ) -> None:
        keep_to_this_machine()
        cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        lm = replace(spec, threads=math.ceil(cores)).load()
        name = serve.get_replica_context().replica_id.unique_id
        address = ray.util.get_node_ip_address()
        super().__init__(lm, name, seconds, edge, images, address=address, special_tokens=special_tokens)
        if spec.learning is not None:
            from pipeline.learning.feed import LearningFeed  # late: the method may be away

            LearningFeed(lm, _find_own_learner).start()


def _find_own_learner() -> Any | None:
    return find_learner(_learner_name())


class LearnerKeeper:
    """Ray Serve deployment that starts the learner and reports on it."""

    def __init__(self, spec: LearnerSpec) -> None:
        keep_to_this_machine()
        self._learner = _only_learner(spec)
        self._pulse = Pulse(_ASK_SECONDS, self._ask)
        self._pulse.start()

    def report(self) -> LearningReport:
        return self._learner.last

    def _ask(self) -> None:
        self._learner.ask()

    def __del__(self) -> None:
        """End the learner in good order; Ray Serve calls this as the endpoint is taken down."""
        if hasattr(self, "_pulse"):
            self._pulse.end()
            self._learner.close()


def _only_learner(spec: LearnerSpec) -> WatchedLearner:
    """Start a learner, and end one that an update of the endpoint left: two must not write to one folder."""
    for _ in range(_TRIES):
        try:
            return WatchedLearner(spec, _learner_name())
        except ValueError:
            if (other := _find_own_learner()) is not None:
                ray.kill(other)
            time.sleep(_NAME_SECONDS)
    raise RuntimeError(f"the learner before this one has not ended in {_TRIES * _NAME_SECONDS:g} s")


def _learner_name() -> str:
    return f"{serve.get_replica_context().app_name}-learner"

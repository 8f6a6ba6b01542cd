"""A replica's side of devices that draft: each session is a row of the engine, parked while its device drafts.

The ingress asks a replica for a place, and gets an address on which it sends the device's messages and receives the
replica's. A place outlives its connections, so a device that was cut off finds its session again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from drafter.edge.messages import FROM_DEVICE, Close, Draft, Error, Message, MessageError, Open, Opened, Verified
from drafter.edge.messages import read as read_message
from drafter.edge.messages import write as write_message
from drafter.engine.handle import Handle
from drafter.errors import RequestError
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request
from drafter.text.tokenizers import vocabulary_digest
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import ParsedRequest, parse_chat, parse_completion
from pipeline.serving.config import EdgeConfig
from pipeline.serving.handles import Call, Device

_UNSENT = 64  # messages that wait for a device; further ones are dropped, and it asks again
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

Encode = Callable[[Call], Awaitable[list[Request]]]
"""Makes a request of the engine for each choice of a call."""


def parse_request(body: dict[str, Any]) -> ParsedRequest:
    """Parse the body of `Open.request`: of either route, for one text without log-probabilities."""
    parsed = (parse_chat if "messages" in body else parse_completion)({"model": "edge", **body})
    if parsed.choices != 1 or parsed.stream or parsed.wants_logprobs or parsed.echo or parsed.token_ids:
        raise OpenAIError(400, "A session is one text: without 'n', 'stream', 'echo', token ids and log-probabilities.")
    if parsed.images:
        raise OpenAIError(400, "A device drafts from text alone: its messages may have no images.", "messages")
    return parsed


class EdgeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        self.opened = Counter("drafter_edge_opened", "Sessions opened.", registry=self.registry)
        self.stale = Counter("drafter_edge_stale", "Drafts answered from what was known.", registry=self.registry)
        self.drafted = histogram("drafter_edge_draft_tokens", "Draft tokens of a message.", buckets=_TOKENS)
        self.accepted = histogram("drafter_edge_accepted_tokens", "Those that became output.", buckets=_TOKENS)
        waiting = "Seconds from a draft to its answer, in the replica."
        self.waiting = histogram("drafter_edge_waiting_seconds", waiting, buckets=_SECONDS)
        away = "Seconds from an answer to the next draft: the way to the device and back, and its drafting."
        self.away = histogram("drafter_edge_away_seconds", away, buckets=_SECONDS)


class EdgeSession:
    """A device's text: the row that decodes it, its output so far, and the draft to be answered.

    Its methods are called in the replica's event loop.
    """

    def __init__(self, host: EdgeHost, device: Device) -> None:
        self._host, self._device = host, device
        self.over = asyncio.Event()
        self.unsent: asyncio.Queue[str] = asyncio.Queue(_UNSENT)
        self.sender: asyncio.Task[None] | None = None  # over the newest connection
        self.output: list[int] = []
        self._opening: Open | None = None
        self._prompt: tuple[int, ...] = ()
        self._handle: Handle | None = None
        self._finished: str | None = None
        self._opened = False
        self._seq = -1
        self._pending: tuple[Draft, float] | None = None  # and when it came
        self._answered: float | None = None  # when the last answer went
        self._reader: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = self._loop.call_later(host.config.idle_seconds, self.end, "idle", "no message came for too long")
        self._silence: asyncio.TimerHandle | None = None

    async def take(self, message: Open | Draft | Close) -> None:
        """Act on a device's message; raises `MessageError` or `OpenAIError` for one after which nothing can go on."""
        if self.over.is_set():
            return
        self._heard()
        match message:
            case Open():
                await self._open(message)
            case Draft():
                self._draft(message)
            case Close():
                self.end()
        if self._opened and self._pending is None and not self.over.is_set():
            self._wait_for_device()

    def end(self, code: str | None = None, reason: str = "") -> None:
        """Free the row, and tell the device why unless it has asked for it."""
        if code is not None:
            self._send(Error(code, reason))
        for timer in (self._idle, self._silence):
            if timer is not None:
                timer.cancel()
        if self._handle is not None:
            self._handle.cancel()
        if self._reader is not None:
            self._reader.cancel()
        self.over.set()

    # ---- messages

    async def _open(self, message: Open) -> None:
        if self._opening is None:
            self._opening = message
            if message.tokenizer != await self._host.tokenizer():
                raise MessageError("tokenizer", "the device's tokeniser is not the model's: use the model's own")
            parsed = parse_request(message.request).for_model(self._host.lm.tokenizer)
            if message.prompt is not None:
                parsed = replace(parsed, prompts=(list(message.prompt),))
            call = Call(parsed, False, self._device.may_teach, self._device.client)
            (request,) = await self._host.encode(call)
            if self.over.is_set():  # meanwhile
                return
            self._prompt = tuple(request.prompt_ids)
            self._handle = self._host.lm.submit(request, stream=True)
            self._host.metrics.opened.inc()
            self._verify_known()
            self._reader = asyncio.create_task(self._read(self._handle))
            return
        known = len(message.output)
        if self._opened and known > len(self.output):
            raise MessageError("gap", f"the session has {len(self.output)} tokens, and the device {known}")
        self._opening = message
        if self._opened:
            self._answer_opening()

    def _draft(self, draft: Draft) -> None:
        if not self._opened or self._handle is None:
            raise MessageError("gap", "the session is not opened yet: wait for its answer")
        most, length = self._host.config.draft_tokens, len(self.output)
        if len(draft.tokens) > most:
            self._refuse(draft, "too_many_tokens", f"a draft may have {most} tokens, not {len(draft.tokens)}")
        elif draft.at > length:
            self._refuse(draft, "gap", f"the text has {length} output tokens, and the draft continues {draft.at}")
        elif draft.seq <= self._seq or draft.at < length or self._finished is not None:
            # Nothing of it is new, or the text has gone on without it: what is known answers it.
            if self._pending is None or draft.at < length:
                self._host.metrics.stale.inc()
                self._answer(draft)
        else:
            try:
                self._handle.draft(draft.tokens, draft.tree, draft.at)
            except RequestError as error:
                self._refuse(draft, "malformed", str(error))
                return
            now = time.monotonic()
            if self._answered is not None:
                self._host.metrics.away.observe(now - self._answered)
            self._host.metrics.drafted.observe(len(draft.tokens))
            self._pending, self._seq = (draft, now), draft.seq
            self._handle.unpark(draft.at + 1)

    def _refuse(self, draft: Draft, code: str, reason: str) -> None:
        self._send(Error(code, reason, draft.seq))

    def _answer(self, draft: Draft) -> None:
        tokens = tuple(self.output[draft.at :])
        accepted = min(len(draft.follow(tokens)), len(tokens))
        self._send(Verified(draft.seq, draft.at, accepted, tokens, self._finished))

    def _answer_opening(self) -> None:
        assert self._opening is not None
        at = len(self._opening.output)
        tokens = tuple(self.output[at:])
        known = self._opening.prompt is not None or isinstance(self._opening.request.get("prompt"), list)
        prompt = None if known else self._prompt
        self._send(Opened(at, tokens, self._host.config.draft_tokens, prompt, self._finished))

    def _send(self, message: Message) -> None:
        if not self.unsent.full():
            self.unsent.put_nowait(write_message(message))

    # ---- what the engine makes

    async def _read(self, handle: Handle) -> None:
        """Follow the row to its end."""
        outcome = asyncio.ensure_future(handle.outcome())
        try:
            async for deltas in handle.arrivals():
                for delta in deltas:
                    self.output += delta.token_ids
                if not handle.future.done():  # otherwise the last answer says how it ended
                    self._progress()
            generation = await outcome
            self._finished = generation.finish_reason
            self._host.finished(generation)
            if self._opened and self._pending is None:
                self._send(Verified(max(self._seq, 0), len(self.output), 0, (), self._finished))
            self._progress()
        except Exception as error:  # of any kind: it ends the session
            refusal = self._host.client_error(error)
            self.end(refusal.code or "failed", refusal.message)
        finally:
            outcome.cancel()

    def _progress(self) -> None:
        """Answer what can be answered now."""
        if not self._opened:
            self._verify_known()
        elif self._pending is not None and (len(self.output) > self._pending[0].at or self._finished is not None):
            draft, came = self._pending
            self._pending = None
            self._host.metrics.waiting.observe(time.monotonic() - came)
            self._host.metrics.accepted.observe(len(draft.follow(self.output[draft.at :])))
            self._answer(draft)
            self._wait_for_device()

    def _verify_known(self) -> None:
        """Verify the tokens that the device has from another replica, as drafts, and answer when all are."""
        assert self._opening is not None
        assert self._handle is not None
        known, length = self._opening.output, len(self.output)
        if tuple(self.output[: len(known)]) != known[:length]:
            self.end("text", "the device's text is not the model's: open another session")
        elif length > len(known) or (self._finished is not None and length == len(known)):
            self._opened = True
            self._answer_opening()
            self._wait_for_device()
        elif self._finished is not None:
            self.end("text", "the device's text is longer than the model's: open another session")
        else:
            piece = known[length : length + self._host.config.draft_tokens]
            if piece:
                self._handle.draft(piece, range(-1, len(piece) - 1), length)
            self._handle.unpark(length + 1)

    # ---- silence

    def _heard(self) -> None:
        self._idle.cancel()
        self._idle = self._loop.call_later(
            self._host.config.idle_seconds, self.end, "idle", "no message came for too long"
        )
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
            if self._handle is not None and self._pending is None and self._opened:
                self._handle.park()  # it may be going on by itself

    def _wait_for_device(self) -> None:
        """Let the row go on by itself, if the device wants that, once it has been silent for as long as it said."""
        self._answered = time.monotonic()
        if self._silence is not None:
            self._silence.cancel()
        patience = None if self._opening is None else self._opening.patience
        if patience is not None and self._handle is not None and self._finished is None:
            self._silence = self._loop.call_later(patience, self._handle.unpark)


class EdgeHost:
    """The sessions of a replica, and the socket on which the ingress brings their messages.

    Args:
        address: Where it listens.
        encode: Makes a request of the engine.
        finished: Called with each text that has ended.
        client_error: Returns an error as clients see it.
    """

    def __init__(
        self,
        lm: SpeculativeLM,
        config: EdgeConfig,
        address: str,
        encode: Encode,
        finished: Callable[[Generation], object],
        client_error: Callable[[Exception], OpenAIError],
    ) -> None:
        self.lm, self.config, self.encode, self.finished, self.client_error = lm, config, encode, finished, client_error
        self.metrics = EdgeMetrics()
        self.sessions: dict[str, EdgeSession] = {}
        self._address = address
        self._server: asyncio.Task[Server] | None = None

    async def host(self, device: Device) -> AsyncGenerator[str, None]:
        """Make a place for a session: yield its address, and end when the session does, which leaving ends, too."""
        if self._server is None:
            self._server = asyncio.create_task(self._listen())
        server = await asyncio.shield(self._server)
        port = next(iter(server.sockets)).getsockname()[1]
        # Who knows the ticket may speak for the session, so only the ingress does.
        ticket, session = secrets.token_hex(16), EdgeSession(self, device)
        self.sessions[ticket] = session
        try:
            host = f"[{self._address}]" if ":" in self._address else self._address
            yield f"ws://{host}:{port}/{ticket}"
            await session.over.wait()
        finally:
            session.end()
            del self.sessions[ticket]

    def families(self) -> list[Metric]:
        """Return the metrics of sessions for Prometheus; none where there is no route for them."""
        if not self.config.sessions:
            return []
        sessions = GaugeMetricFamily("drafter_edge_sessions", "Sessions of devices.", len(self.sessions))
        return [sessions, *self.metrics.registry.collect()]

    async def tokenizer(self) -> str:
        return await asyncio.to_thread(lambda: self._digest)

    @cached_property
    def _digest(self) -> str:
        return vocabulary_digest(self.lm.tokenizer)

    async def _listen(self) -> Server:
        def check(connection: ServerConnection, request: Any) -> Any:
            known = request.path[1:] in self.sessions
            return None if known else connection.respond(HTTPStatus.NOT_FOUND, "")

        size = None  # the ingress has limited it
        return await serve(
            self._talk, self._address, 0, process_request=check, compression=None, max_size=size, ping_interval=None
        )

    async def _talk(self, connection: ServerConnection) -> None:
        """Pass messages between the ingress and a session, for one connection of its device."""
        session = self.sessions.get(connection.request.path[1:]) if connection.request is not None else None
        if session is None:
            return
        while not session.unsent.empty():  # those for a connection before
            session.unsent.get_nowait()
        if session.sender is not None:
            session.sender.cancel()

        async def send() -> None:
            while True:
                await connection.send(await session.unsent.get())

        session.sender = sender = asyncio.create_task(send())
        over = asyncio.create_task(session.over.wait())
        try:
            receiver = asyncio.create_task(self._receive(connection, session))
            await asyncio.wait([receiver, over], return_when=asyncio.FIRST_COMPLETED)
            receiver.cancel()
        finally:
            sender.cancel()
            over.cancel()
        try:
            while not session.unsent.empty():
                await connection.send(session.unsent.get_nowait())
        except ConnectionClosed:
            pass

    async def _receive(self, connection: ServerConnection, session: EdgeSession) -> None:
        try:
            async for text in connection:
                await session.take(read_message(text, FROM_DEVICE))
        except ConnectionClosed:
            pass
        except MessageError as error:
            session.end(error.code, str(error))
        except Exception as error:  # of any kind: it ends the session
            refusal = self.client_error(error)
            session.end(refusal.code or "refused", refusal.message)

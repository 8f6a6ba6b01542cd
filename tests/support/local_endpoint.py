"""The endpoint without Ray: the same routes and answers behind a real socket, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from drafter.edge.messages import PATH
from pipeline.batches.config import BatchesConfig
from pipeline.serving.app import create_app
from pipeline.serving.config import EdgeConfig, LimitsConfig
from pipeline.serving.connections import Connections
from pipeline.serving.edge import EdgeRoute
from pipeline.serving.handles import Answer, Call, Device, Engines, Reply, Snapshot
from pipeline.serving.keys import Agreement, Keys
from pipeline.serving.replica import Answers


class Replies:
    """A replica's replies, to be cancelled like those of a deployment's handle."""

    def __init__(self, replies: AsyncIterator[Reply]) -> None:
        self._replies: Any = replies
        self._next: asyncio.Future[Reply] | None = None

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> Reply:
        self._next = asyncio.ensure_future(anext(self._replies))
        return await self._next

    def cancel(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.cancel()
            return
        asyncio.get_running_loop().create_task(self._replies.aclose())


class LocalEngines(Engines):
    """Engines in this process."""

    def __init__(self, answers: Mapping[str, Answers]) -> None:
        super().__init__({})
        self._answers = answers

    @property
    def names(self) -> list[str]:
        return list(self._answers)

    async def ask(self, call: Call) -> Answer:
        replies = Replies(self._answers[call.request.model].answer(call))
        return Answer(await anext(replies), replies)

    async def host(self, model: str, device: Device) -> Answer:
        replies = Replies(self._answers[model].host(device))
        return Answer(await anext(replies), replies)

    async def snapshots(self) -> dict[str, list[Snapshot]]:
        return {name: [one.snapshot()] for name, one in self._answers.items()}


@contextmanager
def served(
    answers: Mapping[str, Answers],
    keys: Keys | None = None,
    limits: LimitsConfig | None = None,
    agreement: Agreement | None = None,
    edge: EdgeConfig | None = None,
    batches: BatchesConfig | None = None,
) -> Iterator[str]:
    """Serve on a free port of the loopback; gives the server's address."""
    limits, engines = limits or LimitsConfig(), LocalEngines(answers)
    file_bytes = None if batches is None else batches.file_bytes
    connections = Connections(limits, keys, upgrades=None if edge is None else PATH, file_bytes=file_bytes)
    route = None if edge is None else EdgeRoute(engines, edge, limits)
    app = create_app(
        engines, connections, loopback=True, agreement=agreement, edge=route, batches=batches, lines_at_once=8
    )
    with listening(app, connections) as address:
        yield address


@contextmanager
def listening(app: ASGIApp, connections: Connections) -> Iterator[str]:
    """Have any application answer, with the endpoint's budget of connections; gives the server's address."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = connections.protocol()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="auto", http=http, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

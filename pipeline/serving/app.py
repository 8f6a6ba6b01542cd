"""The ingress, which holds no model: FastAPI application with routes, keys, limits and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from drafter.edge.messages import PATH
from pipeline.batches.config import BatchesConfig
from pipeline.batches.runner import AnswerLine, Batches
from pipeline.errors import InputError
from pipeline.openai.errors import OpenAIError, clipped, server_error
from pipeline.progress.board import LearningReport
from pipeline.progress.prometheus import learner_families
from pipeline.serving import openapi
from pipeline.serving.answering import Answering, no_model
from pipeline.serving.batches import add_batches
from pipeline.serving.config import EdgeConfig, KeyRule, LimitsConfig, ServingLearning
from pipeline.serving.connections import Connections
from pipeline.serving.edge import EdgeRoute
from pipeline.serving.handles import (
    Answer,
    Engines,
    Failure,
    keep_to_this_machine,
    learner_report,
    metrics_page,
    unavailable,
)
from pipeline.serving.keys import Agreement, read_agreement, read_keys
from pipeline.serving.request_checks import LoopbackHosts, read_body

_MESSAGES = {
    404: "There is nothing at this address: OpenAI's API is at /v1, and a client's base URL ends with it.",
    405: "This address does not take this method.",
}
_PAGE_HEADERS = {  # a browser may run the page's own script and style and ask this server only; none can frame it
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}

LearnerReport = Callable[[], Awaitable[LearningReport | None]]

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """Ray Serve deployment that clients reach. It imports no model code, so that it starts soon and is small.

    The keys are read here, in the process that checks them, from its own environment and disk: another machine may
    build the application, and may have no keys.

    Args:
        engines: Handles of the replicas, by the name of their model.
        keys_file: File of keys on this machine.
        rule: As `settle` returned it.
        loopback: Whether Ray Serve listens on a loopback address.
        learner: Handle of its keeper; None where no head learns.
        lines_at_once: Lines of batches that are being answered.

    Raises:
        InputError: The keys cannot be used, or a key is needed and there is none.
    """

    def __init__(
        self,
        engines: Mapping[str, DeploymentHandle],
        keys_file: str | None,
        rule: KeyRule,
        limits: LimitsConfig,
        *,
        loopback: bool,
        edge: EdgeConfig,
        learning: ServingLearning,
        learner: DeploymentHandle | None,
        batches: BatchesConfig,
        lines_at_once: int,
    ):
        try:
            keys = read_keys(keys_file, rule)
            agreement = read_agreement(learning, keys)
        except InputError as error:
            raise InputError(f"{error} (the ingress runs on {socket.gethostname()})") from None
        uploads = None if batches.folder is None else batches.file_bytes
        self._connections = Connections(limits, keys, upgrades=PATH if edge.sessions else None, file_bytes=uploads)
        handles = Engines(engines)
        self._edge = EdgeRoute(handles, edge, limits)
        self._app = create_app(
            handles,
            self._connections,
            edge=self._edge,
            loopback=loopback,
            agreement=agreement,
            learner=None if learner is None else partial(learner_report, learner),
            batches=batches,
            lines_at_once=lines_at_once,
        )
        _listen_with_limits(self._connections)
        keep_to_this_machine()

    def end(self) -> None:
        """Stop batches, and wait for no client that does not read, and no device: the endpoint is shutting down."""
        if self._app.state.batches is not None:
            self._app.state.batches.end()
        self._edge.end()
        self._connections.end()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def _listen_with_limits(connections: Connections) -> None:
    """Change how Ray (2.60) has this process listen, which it has no settings for."""
    from ray.serve._private import replica

    listen = replica.start_asgi_http_server

    async def listen_with_limits(*args: Any, **kwargs: Any) -> Any:
        # The port may be shared: for a minute the kernel keeps the connections of an ingress that has died, and Ray
        # would think that another program has the port, and would not try it again.
        task, server = await listen(*args, **kwargs | {"enable_so_reuseport": True})
        server.config.http = connections.protocol()  # the task has not begun, and will read these
        server.config.ws = "none"
        return task, server

    replica.start_asgi_http_server = listen_with_limits


class EventStream(Response):
    """Streams an answer as server-sent events.

    When the client disconnects, Ray Serve cancels the task that runs this, and with it the request at the replica.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events in self._answer:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answer.cancel()


def create_app(
    engines: Engines,
    connections: Connections,
    *,
    loopback: bool,
    agreement: Agreement | None = None,
    edge: EdgeRoute | None = None,
    learner: LearnerReport | None = None,
    batches: BatchesConfig | None = None,
    lines_at_once: int = 1,
) -> FastAPI:
    """Return the application.

    Args:
        edge: Sessions of devices; None for no such route.
        loopback: Whether only this machine can connect; requests for other hosts are then refused.
        agreement: Clients that opted in to training on their requests; default: none.
        batches: Files and batches; without a folder there are no such routes. They are run during the application's
            lifespan.
        lines_at_once: Lines of batches that are being answered.
    """
    keys, agreement = connections.keys, agreement or Agreement()
    answering = Answering(engines, connections.limits)
    kept = None
    if batches is not None and batches.folder is not None:
        kept = Batches(batches, _line_answerer(answering, agreement), lines_at_once)
    app = FastAPI(
        title="drafter",
        description="OpenAI's API over lossless speculative decoding.",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        lifespan=partial(_lifespan, kept),
    )
    for kind in (OpenAIError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)
    if loopback:
        app.add_middleware(LoopbackHosts)

    def check_key(request: Request) -> None:
        if not keys.may_ask(request.headers.get("authorization")):
            raise OpenAIError(401, "There is no such API key: send one as a bearer token.", code="invalid_api_key")

    def check_operator(request: Request) -> None:
        if not keys.may_operate(request.headers.get("authorization")):
            message = (
                "This is for operators: their keys have the word operator after them in the server's list of keys."
            )
            raise OpenAIError(403, message, code="not_an_operator")

    # The first checks nothing: it has the OpenAPI document say that a key is needed.
    app.state.batches = kept
    keyed = [Depends(HTTPBearer(auto_error=False)), Depends(check_key)] if keys.clients else []
    _add_generation(app, engines, answering, keyed, connections, agreement)
    if kept is not None:
        add_batches(app, kept, keyed, connections)
    if edge is not None and edge.config.sessions:
        _add_edge(app, edge, keyed, connections, agreement)
    _add_models(app, engines, keyed)
    _add_state(app, engines, [*keyed, Depends(check_operator)], connections, learner)
    for path, (name, media_type) in _PAGE_FILES.items():
        app.add_api_route(path, _sender(name, media_type), include_in_schema=False)
    return app


def _line_answerer(answering: Answering, agreement: Agreement) -> AnswerLine:
    async def answer(path: str, body: bytes, client: str) -> tuple[int, str]:
        return await answering.answer_line(path, body, client, may_teach=agreement.covers_client(client))

    return answer


@asynccontextmanager
async def _lifespan(batches: Batches | None, _: FastAPI) -> AsyncIterator[None]:
    """Run the batches for as long as the application runs."""
    if batches is None:
        yield
        return
    running = asyncio.create_task(batches.run())
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _add_generation(
    app: FastAPI,
    engines: Engines,
    answering: Answering,
    keyed: list[Any],
    connections: Connections,
    agreement: Agreement,
) -> None:
    limits = connections.limits

    async def answer(request: Request, path: str) -> Response:
        authorization = request.headers.get("authorization")
        client = connections.keys.client(authorization)
        given = await read_body(request, limits.body_bytes)
        may_teach = agreement.covers(authorization)
        parsed, found = await answering.ask(path, given, client, may_teach=may_teach)
        match found.first:
            case Failure(status, error, headers):
                return JSONResponse(error, status, headers)
            case str() if not parsed.stream:
                return Response(await found.whole(), media_type="application/json")
        return EventStream(found)

    @app.post("/v1/chat/completions", dependencies=keyed, **openapi.chat(engines.names, limits))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, "/v1/chat/completions")

    @app.post("/v1/completions", dependencies=keyed, **openapi.completions(engines.names, limits))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answer(request, "/v1/completions")


def _add_edge(app: FastAPI, edge: EdgeRoute, keyed: list[Any], connections: Connections, agreement: Agreement) -> None:
    @app.get(PATH, dependencies=keyed, include_in_schema=False)
    async def no_web_socket() -> Response:
        raise OpenAIError(
            426, "Sessions of devices go over a WebSocket: see docs/research/edge.md.", code="upgrade_required"
        )

    @app.websocket(PATH)
    async def session(socket: WebSocket) -> None:
        """Verify what a device drafts."""
        authorization = socket.headers.get("authorization")
        if not connections.keys.may_ask(authorization):
            refusal = OpenAIError(401, "There is no such API key: send one as a bearer token.", code="invalid_api_key")
            await socket.send_denial_response(JSONResponse(refusal.body(), refusal.status))
        elif "origin" in socket.headers:  # a web page may connect to any address, this machine's own among them
            refusal = OpenAIError(403, "A web page may not open a session.", code="wrong_origin")
            await socket.send_denial_response(JSONResponse(refusal.body(), refusal.status))
        else:
            client, may_teach = connections.keys.client(authorization), agreement.covers(authorization)
            await edge.serve(socket, client, may_teach=may_teach)


def _add_models(app: FastAPI, engines: Engines, keyed: list[Any]) -> None:
    started = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "drafter"}

    @app.get("/v1/models", dependencies=keyed, **openapi.MODELS)
    async def list_models() -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": [described(name) for name in engines.names]})

    @app.get("/v1/models/{model:path}", dependencies=keyed, **openapi.MODEL)
    async def retrieve_model(model: str) -> Response:
        """Describe one model."""
        name = engines.called(model)
        if name is None:
            raise no_model(model, engines.names)
        return JSONResponse(described(name))


def _add_state(
    app: FastAPI, engines: Engines, operators: list[Any], connections: Connections, learner: LearnerReport | None
) -> None:
    @app.get("/health", **openapi.HEALTH)
    async def health() -> Response:
        """Say whether every model has a replica that works."""
        replicas = {name: len(found) for name, found in (await engines.snapshots()).items()}
        if not all(replicas.values()):
            raise unavailable()
        return JSONResponse({"status": "ok", "replicas": replicas, "connections": connections.state()})

    @app.get("/metrics", dependencies=operators, **openapi.METRICS)
    async def metrics() -> Response:
        """Give the metrics of all replicas, and of the learner, for Prometheus."""
        snapshots: list[tuple[dict[str, str], Sequence[Metric]]] = [({}, connections.families())]
        snapshots += [
            ({"model": name, "replica": snapshot.replica}, snapshot.families)
            for name, found in (await engines.snapshots()).items()
            for snapshot in found
        ]
        report = None if learner is None else await learner()
        if report is not None:
            snapshots.append(({"model": engines.names[0]}, learner_families(report)))
        return Response(metrics_page(snapshots), media_type=CONTENT_TYPE_LATEST)

    if learner is None:
        return

    @app.get("/learning", dependencies=operators, **openapi.LEARNING)
    async def learning() -> Response:
        """Say what the learner does."""
        report = await learner()
        if report is None:
            raise OpenAIError(503, "The learner does not answer at the moment.", code="learner_unavailable")
        return JSONResponse(asdict(report))


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (files("pipeline.serving") / "page" / name).read_bytes()

    async def send() -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return send


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = _MESSAGES.get(error.status_code, "The request cannot be answered.")
        if error.status_code == 404 and request.url.path.startswith("/v1/"):
            known = (
                "/v1/chat/completions, /v1/completions, /v1/models, and with batches.folder /v1/files and /v1/batches"
            )
            message = f"'{clipped(request.url.path)}' is not supported: there are {known}."
        refusal, headers = OpenAIError(error.status_code, message), error.headers
        if error.status_code == 405:  # Starlette would name the methods of one of the path's routes
            here = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
            headers = {"Allow": ", ".join(sorted({method for route in here for method in route.methods}))}
        return JSONResponse(refusal.body(), refusal.status, headers)
    if isinstance(error, RequestValidationError):
        error = OpenAIError(400, "The request cannot be read.")
    elif not isinstance(error, OpenAIError):
        logger.exception("A request failed", exc_info=error)
        error = server_error()
    failure = Failure.of(error)
    return JSONResponse(failure.body, failure.status, failure.headers)

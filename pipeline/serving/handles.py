"""Between the ingress and the replicas: messages, errors, and the handles that send them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import ray
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from pipeline.cluster.ray_cluster import LOOPBACK
from pipeline.openai.answers import error_event
from pipeline.openai.errors import INTERRUPTED, NOT_FINITE, OpenAIError
from pipeline.openai.requests import ParsedRequest
from pipeline.progress.board import LearningReport

_RETRY_LATER = {"Retry-After": "1"}
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would, and it would end the same
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: _NO_RETRY,
    413: {"Connection": "close"},  # or the rest of the body would have to be read
    429: _RETRY_LATER,
    503: _RETRY_LATER,
    507: _NO_RETRY,
}
_TRIES = 3
"""Replicas tried before a request fails. One that dies before its first reply loses nothing: another gives the same."""
_ASK_SECONDS = 5.0  # longest wait for a learner's report or replicas' metrics

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica; `may_teach` if its `client` (see `Keys`) agreed that a head learns from it.

    One in the `background` is a batch's line, for which no live request waits.
    """

    request: ParsedRequest
    speculation: bool
    may_teach: bool = False
    client: str = ""
    background: bool = False

    @property
    def turns(self) -> str:
        """The name under which it waits for its turn where clients take turns."""
        return self.turns_of(self.client, background=self.background)

    @staticmethod
    def turns_of(client: str, *, background: bool) -> str:
        return f"{client} in the background" if background else client


@dataclass(frozen=True)
class Device:
    """A client that drafts for itself, and asks for a session's place in a replica; see `Call`."""

    client: str
    may_teach: bool


@dataclass(frozen=True)
class Failure:
    """HTTP error response, with a body in OpenAI's format. Nothing has been sent before it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @classmethod
    def of(cls, error: OpenAIError) -> Failure:
        """Return an error's response, with the headers of its status."""
        headers = dict(_HEADERS.get(error.status, {}))
        if error.code == NOT_FINITE:
            headers |= _NO_RETRY
        return cls(error.status, error.body(), headers)


Reply = str | Failure
"""A part of a stream's events, or of a JSON body; or, before anything else, a failure."""


@dataclass(frozen=True)
class Snapshot:
    """A replica's metrics at one moment, without a label that names the replica."""

    replica: str
    families: list[Metric]


def overloaded() -> OpenAIError:
    """Return the error for a request that finds all slots and the whole queue taken."""
    return OpenAIError(429, "The server is busy: try again later.", code="rate_limit_exceeded")


def unavailable() -> OpenAIError:
    """Return the error for a request that finds no working replica."""
    return OpenAIError(503, "The model is not available at the moment: try again later.", code="model_unavailable")


def interrupted() -> OpenAIError:
    """Return the error for a request whose replica failed while it answered."""
    return OpenAIError(503, "The model failed while it answered: try again.", code=INTERRUPTED)


async def learner_report(learner: DeploymentHandle) -> LearningReport | None:
    """Return the learner's report; None if it is unavailable."""
    try:
        return await asyncio.wait_for(learner.report.remote(), _ASK_SECONDS)
    except Exception as error:  # of any kind: Ray Serve starts it again, and nothing depends on it
        logger.warning("The learner does not answer: %s", error)
        return None


class Answer:
    """Replies of a replica, streamed."""

    def __init__(self, first: Reply, rest: DeploymentResponseGenerator) -> None:
        self.first = first
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the events of a stream; the last one is an error if the replica dies."""
        try:
            async for events in self._parts():
                yield events
        except OpenAIError as error:
            yield error_event(error)

    async def whole(self) -> str:
        """Return the body of an answer that is not streamed; raises an `OpenAIError` if the replica dies."""
        try:
            return "".join([part async for part in self._parts()])
        finally:
            self.cancel()

    async def _parts(self) -> AsyncIterator[str]:
        assert isinstance(self.first, str)
        yield self.first
        try:
            async for part in self._rest:
                yield part
        except Exception as error:
            logger.exception("A replica failed while it answered")
            raise interrupted() from error

    async def over(self) -> None:
        """Wait until nothing more comes, for whatever reason."""
        with suppress(Exception):
            async for _ in self._rest:
                pass

    def cancel(self) -> None:
        """Free what the answer holds in the replica, unless it is complete."""
        self._rest.cancel()


class Engines:
    """Deployments of engines, by model name."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._asked: asyncio.Task[dict[str, list[Snapshot]]] | None = None
        # Answers are small and many: they need not go through the object store.
        self._handles = {name: handle.options(_by_reference=False) for name, handle in handles.items()}

    @property
    def names(self) -> list[str]:
        return list(self._handles)

    def called(self, name: str) -> str | None:
        """Return the name of the model that a client means by a name or a path; None for no match."""
        return next((one for one in (name, name.rpartition("/")[2]) if one in self.names), None)

    async def ask(self, call: Call) -> Answer:
        """Send a request to a replica and wait for its first reply.

        Raises:
            OpenAIError: No free slot, or no working replica.
        """
        # A line that ends replicas must not end three at once: who runs the batch asks again, for one line at a time.
        return await self._ask(call.request.model, "answer", call, 1 if call.background else _TRIES)

    async def host(self, model: str, device: Device) -> Answer:
        """Get a place for a device's session in a replica, whose address is the first reply, and raise as `ask` does.

        The answer ends with the session; cancel it to end that.
        """
        return await self._ask(model, "host", device, _TRIES)

    async def _ask(self, model: str, method: str, about: Call | Device, tries: int) -> Answer:
        handle = self._handles[model].options(stream=True, method_name=method)
        for _ in range(tries):
            replies = handle.remote(about)
            try:
                return Answer(await anext(replies), replies)
            except BackPressureError as error:
                raise overloaded() from error
            except DeploymentUnavailableError as error:
                raise unavailable() from error
            except RayActorError:
                logger.warning("A replica died before it answered")
            except BaseException:
                replies.cancel()
                raise
        raise interrupted()

    async def snapshots(self) -> dict[str, list[Snapshot]]:
        """Return the metrics of all replicas that answer, by model name. Concurrent callers share one call."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._all_snapshots())
        return await asyncio.shield(self._asked)

    async def _all_snapshots(self) -> dict[str, list[Snapshot]]:
        found: dict[str, list[Snapshot]] = {}
        for name, handle in self._handles.items():
            try:
                response = handle.broadcast("snapshot")
                results: list[Any] = await response.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
            except (DeploymentUnavailableError, TimeoutError):
                results = []
            for one in results:
                if isinstance(one, Exception):
                    logger.warning("A replica does not answer: %s", one)
            found[name] = [one for one in results if isinstance(one, Snapshot)]
        return found


def metrics_page(snapshots: Sequence[tuple[dict[str, str], Sequence[Metric]]]) -> bytes:
    """Return metric families, each with the labels that distinguish their source, in Prometheus's text format."""
    merged: dict[str, Metric] = {}
    for labels, families in snapshots:
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [
                sample._replace(labels=sample.labels | labels)
                for sample in family.samples
                # The library adds when each counter was made: of no use, and as many samples again.
                if not sample.name.endswith("_created")
            ]
    return generate_latest(cast(Collector, SimpleNamespace(collect=merged.values)))


def keep_to_this_machine() -> None:
    """Bind this replica's port for other replicas to the loopback address, if its node has that (Ray 2.60).

    The port listens on all addresses. Call this in each replica's constructor, before Ray opens it.
    """
    from ray.serve._private import replica

    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))

"""Handles by which the ingress calls the learner and the replicas."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

import ray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from pipeline.cluster.local_cluster import LOOPBACK
from pipeline.openai.requests import OpenAIError
from pipeline.openai.stream_events import error_event
from pipeline.progress.board import LearningReport
from pipeline.serving.http.connections import Connections
from pipeline.serving.messages import Call, Reply, Snapshot, interrupted, overloaded, unavailable

_REPORT_SECONDS = 5.0

logger = logging.getLogger("ray.serve")


class LearnerHandle:
    """Calls the deployment of the learner."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def report(self) -> LearningReport | None:
        """Return the learner's report; None if it is unavailable."""
        try:
            return await asyncio.wait_for(self._handle.report.remote(), _REPORT_SECONDS)
        except Exception as error:  # whatever it is: Ray Serve starts it again, and nothing depends on it
            logger.warning("The learner does not answer: %s", error)
            return None


# Handles of the replicas.

Method = Literal["chat", "completions"]
_TRIES = 3
"""Replicas tried before a request fails. A replica that dies before its first reply loses nothing: another one gives
the same answer.
"""
_SNAPSHOT_SECONDS = 5.0


class Answer:
    """Replies of a replica, streamed."""

    def __init__(self, first: Reply, rest: DeploymentResponseGenerator) -> None:
        self.first = first
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the events of a stream; the last one is an error if the replica dies meanwhile."""
        try:
            async for events in self._parts():
                yield events
        except OpenAIError as error:
            yield error_event(error)

    async def whole(self) -> str:
        """Return the body of an answer that is not streamed.

        Raises:
            OpenAIError: The replica died meanwhile.
        """
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
        """Return the name of the model that a client means by a name or a folder's path; None for no match."""
        return next((one for one in (name, name.rpartition("/")[2]) if one in self.names), None)

    async def ask(self, method: Method, call: Call) -> Answer:
        """Send a request to a replica and wait for its first reply.

        Raises:
            OpenAIError: No free slot, or no working replica.
        """
        handle = self._handles[call.request.model].options(stream=True, method_name=method)
        for _ in range(_TRIES):
            replies = handle.remote(call)
            try:
                return Answer(await anext(replies), replies)
            except BackPressureError as error:
                raise overloaded() from error
            except DeploymentUnavailableError as error:
                raise unavailable() from error
            except RayActorError:
                logger.warning("A replica died before it answered: asking another")
            except BaseException:
                replies.cancel()
                raise
        raise unavailable()

    async def snapshots(self) -> dict[str, list[Snapshot]]:
        """Return the metrics of all replicas that answer, by model name.

        Concurrent callers share one call, so that replicas never have more than one.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._all_snapshots())
        return await asyncio.shield(self._asked)

    async def _all_snapshots(self) -> dict[str, list[Snapshot]]:
        found: dict[str, list[Snapshot]] = {}
        for name, handle in self._handles.items():
            try:
                response = handle.broadcast("snapshot")
                results: list[Any] = await response.results_async(timeout_s=_SNAPSHOT_SECONDS, return_exceptions=True)
            except (DeploymentUnavailableError, TimeoutError):
                results = []
            for one in results:
                if isinstance(one, Exception):
                    logger.warning("A replica does not answer: %s", one)
            found[name] = [one for one in results if isinstance(one, Snapshot)]
        return found


# Prometheus metrics of all replicas; any ingress can serve them.


def metrics_page(snapshots: Sequence[tuple[dict[str, str], Sequence[Metric]]]) -> bytes:
    """Return the metrics of replicas and of a learner in Prometheus's text format.

    Args:
        snapshots: The metrics of each, with the labels that distinguish it.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(snapshots))
    return generate_latest(registry)


class _Merged:
    def __init__(self, snapshots: Sequence[tuple[dict[str, str], Sequence[Metric]]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for labels, families in self._snapshots:
            for family in families:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [
                    sample._replace(labels=sample.labels | labels)
                    for sample in family.samples
                    # The library adds when each counter was made: of no use, and as many samples again.
                    if not sample.name.endswith("_created")
                ]
        yield from merged.values()


# Direct ingress of Ray Serve: on a dedicated cluster the ingress itself listens.


def short_ways(port: int) -> dict[str, str]:
    """Return environment variables that have the ingress listen on `port`, without a proxy.

    Set them before Ray starts and Ray Serve is imported. Serve's own proxy then needs another port.
    """
    return {
        # Ingress and replicas talk to each other directly, without a thread between them.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # exclusive
        # A new ingress gets the port at once, even if the old one hangs: there is no proxy that has to notice first.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def keep_to_this_machine() -> None:
    """Bind this replica's port for other replicas to the loopback address, if its node has that (Ray 2.60).

    The port asks for the token but listens on all addresses. Call this in each replica's constructor, before Ray opens
    it.
    """
    from ray.serve._private import replica

    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))


def before_listening(connections: Connections) -> None:
    """Change how Ray (2.60) has this process listen, which it has no settings for.

    An ingress may share its port: for a minute the kernel keeps the connections of one that has died, and Ray would
    think that another program has the port, and would not try it again. And connections have a budget.

    Args:
        connections: Those that will be open.
    """
    from ray.serve._private import replica

    listen = replica.start_asgi_http_server

    async def listen_with_limits(*args: Any, **kwargs: Any) -> Any:
        task, server = await listen(*args, **kwargs | {"enable_so_reuseport": True})
        # The task has not begun: what it finds here is what it goes by.
        server.config.http = connections.protocol()
        server.config.ws = "none"
        return task, server

    replica.start_asgi_http_server = listen_with_limits

"""The replicas as the ingress sees them: ask one for an answer, ask all for their metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from pipeline.openai.api_error import OpenAIError
from pipeline.openai.stream_events import error_event
from pipeline.serving.messages import Call, Reply, Snapshot, interrupted, overloaded, unavailable

Method = Literal["chat", "completions"]
_TRIES = 3
"""Replicas that are asked before a request is given up: one that died before it replied loses nothing, because another
gives the same answer."""
_SNAPSHOT_SECONDS = 5.0

logger = logging.getLogger("ray.serve")


class Answer:
    """What a replica replies, as it comes.

    Args:
        first: Its first reply.
        rest: Its replies after that.
    """

    def __init__(self, first: Reply, rest: DeploymentResponseGenerator) -> None:
        self.first = first
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the events of a stream; the last one is an error if the replica dies on the way."""
        try:
            async for events in self._parts():
                yield events
        except OpenAIError as error:
            yield error_event(error)

    async def whole(self) -> str:
        """Return the body of an answer that is not streamed.

        Raises:
            OpenAIError: The replica has died on the way.
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
        """Free what the answer holds in the replica; nothing happens if it is complete."""
        self._rest.cancel()


class Engines:
    """Deployments of engines, by the name that clients call their model.

    Args:
        handles: The deployments' handles.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._asked: asyncio.Task[dict[str, list[Snapshot]]] | None = None
        # Answers are small and many: they need not go through the object store.
        self._handles = {name: handle.options(_by_reference=False) for name, handle in handles.items()}

    @property
    def names(self) -> list[str]:
        """The models' names."""
        return list(self._handles)

    def called(self, name: str) -> str | None:
        """Return the name of the model that a client means, who may also send its folder's path; None for none."""
        return next((one for one in (name, name.rpartition("/")[2]) if one in self.names), None)

    async def ask(self, method: Method, call: Call) -> Answer:
        """Have a replica answer, and wait for its first reply.

        Raises:
            OpenAIError: There is no room, or no replica that works.
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
        """Return the metrics of all replicas that answer, by the name of their model.

        Who asks while they are being asked shares their answer: whoever may ask, replicas have one such call at a time.
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

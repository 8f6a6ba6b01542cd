"""Server-sent events over HTTP."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.serving.ingress.engine_handles import Answer


class EventStream(Response):
    """Sends an answer as it comes.

    When the client leaves, Ray Serve cancels the task that runs this, wherever it waits; the replica is told at once.

    Args:
        answer: An answer whose first reply is not a failure.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events in self._answer:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answer.cancel()

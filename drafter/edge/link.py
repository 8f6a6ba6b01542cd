"""A device's connection to the server: messages, and how it ends."""

from __future__ import annotations

import json
from contextlib import ExitStack

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from drafter.edge.messages import FROM_SERVER, PATH, Message, MessageError, read, write
from drafter.errors import EngineError, RequestError

_OPEN_SECONDS = 5.0


class LinkClosedError(EngineError):
    """The connection is lost, or was not made."""


class Link:
    """One WebSocket to a server.

    Attributes:
        opened: Whether the session's opening was answered over it.

    Raises:
        LinkClosedError: The server cannot be reached.
        RequestError: It does not let this device in.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.opened, self._stack = False, ExitStack()
        address = url.rstrip("/").removesuffix("/v1").replace("http", "ws", 1) + PATH
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._socket = self._stack.enter_context(
                connect(
                    address, additional_headers=headers, open_timeout=_OPEN_SECONDS, max_size=None, compression=None
                )
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status >= 500 or status == 429:
                raise LinkClosedError(f"it answers with status {status}") from error
            raise RequestError(f"the server at {url} refuses: {_reason(error)}") from error
        except (OSError, WebSocketException) as error:
            raise LinkClosedError(str(error) or type(error).__name__) from error

    def send(self, message: Message) -> None:
        """Send a message; raise `LinkClosedError` if the connection is lost."""
        try:
            self._socket.send(write(message))
        except (OSError, WebSocketException) as error:
            raise LinkClosedError("the connection is lost") from error

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, or None if there is none in time; raise `LinkClosedError` as `send` does."""
        try:
            text = self._socket.recv(seconds)
        except TimeoutError:
            return None
        except (OSError, WebSocketException) as error:
            raise LinkClosedError("the connection is lost") from error
        try:
            found: Message = read(text, FROM_SERVER)
        except MessageError as error:
            raise LinkClosedError(f"the server sends what is no message: {error}") from error
        return found

    def close(self) -> None:
        """Leave; a session stays until it is closed or idle for too long."""
        self._stack.close()


def _reason(error: InvalidStatus) -> str:
    try:
        return str(json.loads(error.response.body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.response.status_code}"

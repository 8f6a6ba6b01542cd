"""A client that does not send its request costs nobody else an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pipeline.serving.serve_config import LimitsConfig
from tests.support.local_endpoint import listening
from tests.support.waiting import PATIENCE

SECONDS = 1.0
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, after more time than a request may take to come."""
    request = Request(scope, receive)
    try:
        body = await request.body()
    except ClientDisconnect:
        return
    await asyncio.sleep(2 * SECONDS)
    await PlainTextResponse(str(len(body)))(scope, receive, send)


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    """Address of a server with little patience."""
    with listening(slow, LimitsConfig(receive_seconds=SECONDS)) as address:
        yield address


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    """Address of a server for few connections, with much patience."""
    with listening(slow, LimitsConfig(connections=5, receive_seconds=PATIENCE)) as address:
        yield address


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def until_closed(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\nhalf"], ids=["nothing", "half a head", "half a body"])
def test_a_request_that_does_not_come_is_given_up(hasty: str, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert until_closed(connection) == b""


def test_a_connection_is_kept_for_the_next_request_but_not_for_ever(hasty: str) -> None:
    with connect(hasty) as connection:
        for _ in range(2):
            connection.sendall(WHOLE)
            assert connection.recv(1 << 16).endswith(b"\r\n\r\n0")
        connection.sendall(b"\r\n")  # which is no request
        assert until_closed(connection) == b""


def test_an_answer_may_take_longer_than_a_request(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(WHOLE + HEAD)  # the next request has begun before the first is answered
        assert b"\r\n\r\n0" in until_closed(connection)


def test_headers_without_an_end_are_cut_off(narrow: str) -> None:
    with connect(narrow) as connection:
        connection.sendall(HEAD)
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(b"X-More: of the same\r\n" * 1_000_000)


def test_who_sends_a_request_is_answered_however_many_others_send_none(narrow: str) -> None:
    with ExitStack() as opened, connect(narrow) as busy:
        busy.sendall(WHOLE)
        idle = [opened.enter_context(connect(narrow)) for _ in range(50)]
        for connection in idle:
            connection.sendall(HEAD)
        assert httpx2.post(narrow, content=b"seven b", timeout=PATIENCE).text == "7"
        assert busy.recv(1 << 16).endswith(b"\r\n\r\n0")  # what is being answered is not cut off
        assert all(until_closed(connection) == b"" for connection in idle[:45])

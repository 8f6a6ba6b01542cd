"""What a connection may cost: a client that keeps to nothing costs nobody else an answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from pipeline.serving import connections as module
from pipeline.serving.config import LimitsConfig
from pipeline.serving.connections import Connections
from pipeline.serving.keys import Keys
from pipeline.serving.request_checks import names_loopback
from tests.support.local_endpoint import listening
from tests.support.waiting import PATIENCE, wait_until

SECONDS = 1.0
KEY = "right"
HEAD = b"POST /v1/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
WHOLE = b"GET /v1/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
KEYED = b"GET /v1/ HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n\r\n"


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, after more time than a request may take to come; at once at `/short`."""
    request = Request(scope, receive)
    try:
        body = await request.body()
    except ClientDisconnect:
        return
    if scope["path"] != "/v1/short":
        await asyncio.sleep(2 * SECONDS)
    await PlainTextResponse(str(len(body)))(scope, receive, send)


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without an end, in pieces of 64 KiB, and with nothing at `/short`."""

    async def pieces() -> AsyncIterator[bytes]:
        while scope["path"] != "/v1/short":
            yield b"x" * (1 << 16)
            await asyncio.sleep(0)

    await StreamingResponse(pieces())(scope, receive, send)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's headers, after all of the body has come."""
    body = await Request(scope, receive).body()
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await JSONResponse({"headers": headers, "bytes": len(body)})(scope, receive, send)


@contextmanager
def budgeted(app: Any, *, keys: bool = False, **limits: Any) -> Iterator[tuple[str, Connections]]:
    """A server's address and its budget."""
    known = Keys((hashlib.sha256(KEY.encode()).digest(),)) if keys else None
    connections = Connections(LimitsConfig(**{"receive_seconds": PATIENCE, **limits}), known)
    with listening(app, connections) as address:
        yield address, connections


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    """Address of a server with little patience."""
    with budgeted(slow, receive_seconds=SECONDS) as (address, _):
        yield address


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    """Address of a server for few connections, with much patience."""
    with budgeted(slow, connections=5) as (address, _):
        yield address


@pytest.fixture(scope="module")
def echoing() -> Iterator[str]:
    """Address of a server that says what it was sent."""
    with budgeted(echo) as (address, _):
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


def test_requests_that_do_not_come_are_given_up(hasty: str) -> None:
    with ExitStack() as opened:
        connections = [opened.enter_context(connect(hasty)) for _ in range(3)]
        for connection, sent in zip(connections, (b"", HEAD, HEAD + b"\r\nhalf"), strict=True):
            connection.sendall(sent)
        assert [until_closed(connection) for connection in connections] == [b""] * 3


def test_a_connection_is_kept_for_the_next_request_but_not_for_ever(hasty: str) -> None:
    with connect(hasty) as connection:
        for _ in range(2):
            connection.sendall(WHOLE.replace(b"/v1/", b"/v1/short"))
            assert connection.recv(1 << 16).endswith(b"\r\n\r\n0")
        connection.sendall(b"\r\n")  # which is no request
        assert until_closed(connection) == b""


def test_an_answer_may_take_longer_than_a_request(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(WHOLE + HEAD)  # the next request has begun before the first is answered
        assert b"\r\n\r\n0" in until_closed(connection)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """Address of a server that knows a key."""
    with budgeted(slow, keys=True) as (address, _):
        yield address


@pytest.mark.parametrize(
    ("before", "endless_part", "keyed"),
    [
        (HEAD, b"X-More: of the same\r\n", False),
        (HEAD + b"X-More: ", b"x" * 1000, True),
        (b"GET /", b"x" * 1000, False),
        (b"", b"\r\n", False),
        (CHUNKED + b"0\r\n", b"X-More: of the same\r\n", False),
        (CHUNKED + b"0\r\nX-More: ", b"x" * 1000, True),
        (CHUNKED + b"1;more=", b"x" * 1000, False),
        (CHUNKED, b"1\r\nx\r\n", True),
        (CHUNKED, b"1\r\nx\r\n", False),
        (
            b"GET /v1/ HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            b"x" * 1000,
            True,
        ),
    ],
)
def test_what_has_no_end_is_cut_off(guarded: str, before: bytes, endless_part: bytes, keyed: bool) -> None:
    if keyed:
        before = before.replace(b"Host: localhost\r\n", b"Host: localhost\r\nAuthorization: Bearer right\r\n")
    with connect(guarded) as connection:
        connection.sendall(before)
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(endless_part * (64_000_000 // len(endless_part)))
    key = {"Authorization": "Bearer right"}
    assert httpx2.get(f"{guarded}/v1/short", headers=key, timeout=PATIENCE).text == "0"


def test_what_is_refused_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an answer takes the refusal's turn, after which uvicorn reads on until it gives the client up."""
    monkeypatch.setattr(module, "_GUEST_TURNS", 1.0)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(SECONDS / 4)  # meanwhile the trailers are refused
        await PlainTextResponse("no", 415)(scope, receive, send)

    with budgeted(answer, keys=True) as (address, _), connect(address) as connection:
        assert httpx2.get(f"{address}/", timeout=PATIENCE).status_code == 415  # which takes the only turn for now
        connection.sendall(CHUNKED.replace(b"\r\n", b"\r\nAuthorization: Bearer right\r\n", 1) + b"0\r\n")
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:
                sent += connection.send(b"X-More: of the same\r\n" * 4096)
        assert sent < 16 << 20  # which the kernel holds


def test_there_are_not_too_many_headers(echoing: str) -> None:
    with connect(echoing) as connection:
        connection.sendall(HEAD + b"a: b\r\n" * 200 + b"\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 400 ")


def test_trailers_are_no_headers(echoing: str) -> None:
    with connect(echoing) as connection:
        connection.sendall(CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: Bearer right\r\nHost: elsewhere\r\n\r\n")
        answer = json.loads(connection.recv(1 << 16).partition(b"\r\n\r\n")[2])
    assert answer == {"headers": {"host": "localhost", "transfer-encoding": "chunked"}, "bytes": 3}


def test_clients_do_not_command_ray(echoing: str) -> None:
    names = ("x-request-disconnect-disabled", "X-Request-Timeout-Seconds", "x-request-id", "serve_multiplexed_model_id")
    answer = httpx2.get(f"{echoing}/v1/", headers={"x-kept": "yes", **dict.fromkeys(names, "?0")}, timeout=PATIENCE)
    assert answer.json()["headers"]["x-kept"] == "yes"
    assert not {name.lower() for name in names} & set(answer.json()["headers"])


def test_who_sends_a_request_is_answered_however_many_others_send_none(narrow: str) -> None:
    with ExitStack() as opened, connect(narrow) as busy:
        busy.sendall(WHOLE)
        idle = [opened.enter_context(connect(narrow)) for _ in range(50)]
        for connection in idle:
            connection.sendall(HEAD)
        assert httpx2.post(f"{narrow}/v1/", content=b"seven b", timeout=PATIENCE).text == "7"
        assert busy.recv(1 << 16).endswith(b"\r\n\r\n0")  # what is being answered is not cut off
        assert all(until_closed(connection) == b"" for connection in idle[:45])


def test_requests_behind_requests_are_cut_off() -> None:
    with budgeted(slow, keys=True) as (address, budget), connect(address) as connection:
        connection.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 600)
        assert b"200 OK" not in until_closed(connection)
        assert budget.cuts["refused"] == 1


def test_who_does_not_read_is_cut_off() -> None:
    with budgeted(endless, keys=True, receive_seconds=SECONDS) as (address, budget), connect(address) as connection:
        connection.sendall(KEYED)
        wait_until(lambda: budget.cuts["unread"] == 1, "it is cut")
        assert budget.state() == {"open": 0, "unread": 0}


@pytest.mark.parametrize("request_", [KEYED, WHOLE], ids=["with a key", "without one"])
def test_who_does_not_read_keeps_nobody_out(request_: bytes) -> None:
    with budgeted(endless, keys=True, connections=8) as (address, budget), ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(connect(address)).sendall(request_)
        wait_until(lambda: budget.state() == {"open": 8, "unread": 8}, "none of them reads")
        key = {"Authorization": "Bearer right"}
        assert httpx2.get(f"{address}/v1/short", headers=key, timeout=PATIENCE).status_code == 200
        assert budget.cuts["crowded"] == 1


def test_guests_that_wait_for_an_answer_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are taken by clients that have sent what they owe: the last in the queue of guests goes."""
    monkeypatch.setattr(module, "_GUEST_TURNS", 1.0)
    with budgeted(endless, keys=True, connections=4) as (address, budget), ExitStack() as opened:
        guests = [opened.enter_context(connect(address)) for _ in range(4)]
        for guest in guests:
            guest.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        key = {"Authorization": "Bearer right"}
        assert httpx2.get(f"{address}/v1/short", headers=key, timeout=PATIENCE).status_code == 200
        assert budget.cuts["crowded"] == 1


def test_at_the_end_nobody_is_waited_for_who_does_not_read() -> None:
    budget = Connections(LimitsConfig(receive_seconds=PATIENCE))

    async def ends_at_the_second(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/short":
            budget.end()
        await endless(scope, receive, send)

    with listening(ends_at_the_second, budget) as address, connect(address) as first, connect(address) as second:
        first.sendall(KEYED)
        wait_until(lambda: budget.state() == {"open": 2, "unread": 1}, "the first does not read")
        assert httpx2.get(f"{address}/v1/short", timeout=PATIENCE).status_code == 200
        second.sendall(KEYED)  # while the server ends
        wait_until(lambda: budget.cuts["unread"] == 2, "both are cut")


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_guests_body_is_thrown_away(declared: bool) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("no", 401)(scope, receive, send)

    with budgeted(refuse, keys=True, body_bytes=1 << 16) as (address, budget), connect(address) as connection:
        length = b"Content-Length: 100000000\r\n\r\n" if declared else b"Transfer-Encoding: chunked\r\n\r\n"
        piece = b"x" * 0x10000 if declared else b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        connection.sendall(b"POST /v1/ HTTP/1.1\r\nHost: localhost\r\n" + length)
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(piece * 1000)
        wait_until(lambda: budget.cuts["refused"] == 1, "it is cut")


@pytest.mark.parametrize(
    ("hosts", "good"),
    [
        (["localhost"], True),
        (["LOCALHOST:8000"], True),
        (["127.0.0.1:1"], True),
        (["127.4.5.6"], True),
        (["[::1]"], True),
        (["[::1]:8000"], True),
        ([], False),
        ([""], False),
        (["evil.example"], False),
        (["evil.example:8000"], False),
        (["localhost.evil.example"], False),
        (["127.0.0.1.evil.example"], False),
        (["localhost:8000:8000"], False),
        (["localhost:x"], False),
        (["::1"], False),
        (["[::2]"], False),
        (["10.0.0.7"], False),
        (["localhost", "evil.example"], False),
    ],
)
def test_which_hosts_are_this_machine(hosts: list[str], good: bool) -> None:
    assert names_loopback(hosts) == good


def test_bodies_of_guests_hold_up_no_body_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURNS", 4.0)
    with budgeted(echo, keys=True) as (address, budget), ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(connect(address)).sendall(CHUNKED + b"20000\r\n" + b"x" * 0x20000)
        wait_until(lambda: budget.guests_pieces.last is not None, "guests wait for their turns")
        key = {"Authorization": "Bearer right"}
        answer = httpx2.post(f"{address}/v1/", content=b"x" * 300_000, headers=key, timeout=PATIENCE).json()
        assert answer["bytes"] == 300_000
        assert budget.guests_pieces.last is not None


def test_large_bodies_with_a_key_are_read_in_turns_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURNS", 8.0)
    with budgeted(echo, keys=True) as (address, budget), ExitStack() as opened:
        clients = [opened.enter_context(connect(address)) for _ in range(3)]
        for client in clients:
            client.sendall(HEAD.replace(b"100", b"1000000") + b"Authorization: Bearer right\r\n\r\n")
            client.sendall(b"x" * 1_000_000)
        wait_until(lambda: budget.pieces.last is not None, "they wait for their turns")
        for client in clients:
            assert json.loads(client.recv(1 << 16).partition(b"\r\n\r\n")[2])["bytes"] == 1_000_000

"""Whatever bytes come on a connection, before a key and after it: they are answered or refused, and do no harm."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter import SpeculativeLM
from pipeline.serving.app import create_app
from pipeline.serving.config import LimitsConfig
from pipeline.serving.connections import Connections
from pipeline.serving.keys import ENVIRONMENT, read_keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import LocalEngines, listening
from tests.support.properties import examples
from tests.support.waiting import PATIENCE, wait_until

KEY = {"Authorization": "Bearer right"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
PARAMETERS = ("model", "messages", "prompt", "temperature", "top_k", "stop", "logit_bias", "metadata", "stream", "n")
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "how many"}], "max_tokens": 2}


def content(changes: dict[str, Any]) -> bytes:
    return json.dumps({**CHAT, **changes}).encode()


bodies = st.dictionaries(st.sampled_from(PARAMETERS), JSON, max_size=3).map(content) | st.binary(max_size=60)
methods = st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI"])
paths = st.sampled_from(
    [b"/", b"/v1/chat/completions", b"/v1/completions", b"/v1/models/%ff", b"/health", b"*", b"/-/x"]
)
headers = st.sampled_from(
    [
        b"Authorization: Bearer right",
        b"Authorization: Bearer \xff\xfe",
        b"Content-Type: application/json",
        b"Content-Length: 7",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: -1",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Connection: Upgrade\r\nUpgrade: websocket",
        b"Connection: close",
        b"Expect: 100-continue",
        b"Host: evil.example",
        b"x-request-id: \xff",
        b": no name",
        b"folded: a\r\n b",
    ]
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Something like a request."""
    body = draw(bodies)
    lines = [
        draw(methods) + b" " + draw(paths) + draw(st.sampled_from([b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b""]))
    ]
    lines += [b"Host: localhost", *draw(st.lists(headers, max_size=4))]
    if draw(st.booleans()):  # a good one
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json"]
        lines += draw(st.sampled_from([[], [b"Authorization: Bearer right"]]))
        if draw(st.booleans()):
            lines.append(b"Transfer-Encoding: chunked")
            size = draw(st.sampled_from([b"%x" % len(body), b"%x;a=b" % len(body), b"fffffffffffffffff", b"-1", b""]))
            trailer = draw(st.sampled_from([b"", b"Host: elsewhere\r\n", b"\xff\r\n"]))
            body = size + b"\r\n" + body + b"\r\n0\r\n" + trailer + b"\r\n"
        else:
            lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


streams = st.lists(messages() | st.binary(max_size=40) | st.just(b"\r\n"), max_size=4).map(b"".join)


@pytest.fixture(scope="module")
def server(plain: SpeculativeLM) -> Iterator[tuple[str, Connections, list[logging.LogRecord]]]:
    """A server with a key: its address, its budget, and what its event loop complains of."""
    complaints: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record)

    listener, logger = Listener(logging.ERROR), logging.getLogger("asyncio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, "right")
        budget = Connections(LimitsConfig(), read_keys(None, "required"))
    app = create_app(LocalEngines({NAME: Answers(plain, "replica", seconds=PATIENCE)}), budget, loopback=True)
    logger.addHandler(listener)
    with listening(app, budget) as address:
        yield address, budget, complaints
    logger.removeHandler(listener)


def exchange(address: str, sent: bytes, *, at_once: bool) -> bytes:
    """Send bytes, and nothing more once no answer comes; all that comes back."""
    host, port = address.removeprefix("http://").split(":")
    found, size = b"", max(len(sent), 1) if at_once else 7
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection, suppress(OSError):
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        connection.settimeout(0.05)
        with suppress(TimeoutError):
            while piece := connection.recv(1 << 16):
                found += piece
        connection.settimeout(PATIENCE)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 16):
            found += piece
    return found


@examples(1000)
@given(streams, st.booleans())
def test_any_bytes_are_answered_or_refused(
    server: tuple[str, Connections, list[logging.LogRecord]], sent: bytes, at_once: bool
) -> None:
    address, budget, complaints = server
    answer = exchange(address, sent, at_once=at_once)
    assert answer == b"" or re.match(rb"HTTP/1\.1 [1-4]\d\d ", answer)
    assert not re.search(rb"HTTP/1\.1 5|Traceback|site-packages", answer)
    wait_until(lambda: budget.state() == {"open": 0, "unread": 0}, "the connection is closed")
    assert [record.getMessage() for record in complaints] == []


def test_the_server_is_well_afterwards(server: tuple[str, Connections, list[logging.LogRecord]]) -> None:
    address, _, _ = server
    assert httpx2.post(f"{address}/v1/chat/completions", json=CHAT, headers=KEY, timeout=PATIENCE).status_code == 200

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from drafter.errors import RequestError
from pipeline.errors import InputError
from pipeline.io import fetching
from pipeline.io.fetching import fetch_web
from pipeline.settings import ImagesConfig

PUBLIC = "127.0.0.2"
"""Stands for a public address: no other one can be reached from here."""
Respond = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(address: str, respond: Respond) -> Iterator[tuple[int, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.headers['Host']}{self.path}")
            respond(self)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    made = ThreadingHTTPServer((address, 0), Handler)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield made.server_port, asked
    finally:
        made.shutdown()
        made.server_close()


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    is_public, look_up = fetching._is_public, socket.getaddrinfo
    monkeypatch.setattr(fetching, "_is_public", lambda address: address == PUBLIC or is_public(address))

    def found(host: str, *others: Any, **more: Any) -> Any:
        return look_up({"pictures.test": PUBLIC, "inside.test": "127.0.0.1"}.get(host, host), *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)


def sends(content: bytes, **headers: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    return respond


def moves_to(address: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", address)
        handler.end_headers()

    return respond


def refusal(address: str, hosts: list[str], most: int = 100, seconds: float = 5.0) -> str:
    with pytest.raises(RequestError) as refused:
        fetch_web(address, most, hosts, seconds)
    return str(refused.value)


def test_a_listed_host_is_asked() -> None:
    with server(PUBLIC, sends(b"picture")) as (port, asked):
        host = f"pictures.test:{port}"
        assert fetch_web(f"http://{host}/a/b.png?size=2#top", 100, [host]) == b"picture"
        assert asked == [f"{host}/a/b.png?size=2"]
        assert fetch_web(f"HTTP://PICTURES.test:{port}", 100, [host]) == b"picture"
        assert "more than 6 bytes" in refusal(f"http://{host}/", [host], most=6)


def test_no_other_host_is_asked() -> None:
    with server("127.0.0.1", sends(b"secret")) as (port, asked):
        listed = [f"inside.test:{port}", f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "pictures.test"]
        for host in ("inside.test", "127.0.0.1", "localhost"):
            assert "not public" in refusal(f"http://{host}:{port}/", listed)
        assert "not among" in refusal("http://other.test/", listed)
        assert "not among" in refusal(f"http://pictures.test:{port}/", listed)
        assert "not among" in refusal("http://pictures.test@other.test/", listed)
        for address in (
            "file:///etc/passwd",
            "ftp://pictures.test/",
            "http://",
            "http://pictures.test/a b",
            "http://pictures.test/é",
            "http://[",
            "",
        ):
            assert "no address" in refusal(address, listed)
        assert asked == []


def test_usual_ports_and_addresses_are_hosts_too() -> None:
    for listed, address in (
        ("inside.test:443", "https://inside.test/"),
        ("inside.test", "http://inside.test:80/"),
        ("[::1]", "http://[::1]/"),
        ("[::1]:8080", "http://[::1]:8080/"),
    ):
        assert "not public" in refusal(address, ImagesConfig([listed]).hosts)
        assert "not among" in refusal(address, ["inside.test:8443", "::1", "::1:8080"])
    for name in ("Pictures.test", "*.pictures.test", "pictures.test/", "a b", "", "::1"):
        with pytest.raises(InputError, match="hosts must be names"):
            ImagesConfig([name])


def test_every_redirect_is_checked() -> None:
    with server("127.0.0.1", sends(b"secret")) as (inside, asked):
        for target in (
            f"http://127.0.0.1:{inside}/",
            f"http://inside.test:{inside}/",
            "file:///etc/passwd",
            "//[::1]/",
        ):
            with server(PUBLIC, moves_to(target)) as (port, _):
                listed = [f"pictures.test:{port}", f"127.0.0.1:{inside}", f"inside.test:{inside}"]
                assert any(
                    why in refusal(f"http://pictures.test:{port}/", listed)
                    for why in ("not public", "no address", "not among")
                )
        assert asked == []
    with (
        server(PUBLIC, sends(b"picture")) as (last, _),
        server(PUBLIC, moves_to(f"http://pictures.test:{last}/b")) as (port, _),
    ):
        address, listed = f"http://pictures.test:{port}/a", [f"pictures.test:{port}", f"pictures.test:{last}"]
        assert fetch_web(address, 100, listed) == b"picture"
        assert "not among" in refusal(address, listed[:1])
    for broken in ("http://[", "//[::1", "//a\xbd.com/", "http://pictures.test:99999/", "gopher://a/", "http://a b/"):
        with server(PUBLIC, moves_to(broken)) as (port, _):
            assert "no address" in refusal(f"http://pictures.test:{port}/", [f"pictures.test:{port}"]), broken
    for name in ("a" * 70 + ".test", "a..test"):
        assert "host" in refusal(f"https://{name}/", [name])
    with server(PUBLIC, moves_to("/again")) as (port, asked):
        assert "3 other addresses" in refusal(f"http://pictures.test:{port}/", [f"pictures.test:{port}"])
        assert len(asked) == 4


def test_an_answer_is_bounded_in_size_and_time() -> None:
    ended: list[bytes] = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with_pauses(handler, b"x" * 64, 0.0)

    def dripping(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with_pauses(handler, b"x", 0.1)

    def slow_head(handler: BaseHTTPRequestHandler) -> None:
        with_pauses(handler, b"H", 0.1)

    def with_pauses(handler: BaseHTTPRequestHandler, piece: bytes, seconds: float) -> None:
        try:
            for _ in range(10_000):  # with pauses for a quarter of an hour
                handler.wfile.write(piece)
                time.sleep(seconds)
        except OSError:  # the client has left
            return
        ended.append(piece)

    for respond, why in (
        (endless, "more than 1,000 bytes"),
        (dripping, "takes too long"),
        (slow_head, "takes too long"),
    ):
        with server(PUBLIC, respond) as (port, _):
            assert why in refusal(f"http://pictures.test:{port}/", [f"pictures.test:{port}"], most=1000, seconds=0.5)
    assert not {b"x", b"H"} & set(ended)  # the client has not waited for their end
    for answer, why in (
        (sends(b"cut", **{"Content-Length": "9"}), "ended before"),
        (lambda handler: handler.send_error(404), "status 404"),
    ):
        with server(PUBLIC, answer) as (port, _):
            assert why in refusal(f"http://pictures.test:{port}/", [f"pictures.test:{port}"])


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
        *(
            "2002:7f00:1::",
            "2001:0:4136:e378:8000:63bf:80ff:fffe",
            "64:ff9b:1::a00:1",
            "::ffff:0:10.0.0.1",
            "::10.0.0.1",
        ),
    ],
)
def test_what_is_not_public_is_known(address: str) -> None:
    assert not fetching._is_public(address)


def test_public_addresses_are_known() -> None:
    assert all(map(fetching._is_public, ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8")))

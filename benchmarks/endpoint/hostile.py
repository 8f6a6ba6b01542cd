"""Hostile clients of the endpoint, without a key and with one: what do they cost everybody else?

    python -m benchmarks.endpoint.hostile --seconds 60 --json benchmarks/results/hostile.json

For each kind, eight connections do the same thing again and again for some time, while a neighbour with another key
streams answers and somebody asks `/health` four times a second. Reported are the longest of these answers, the
neighbour's tokens a second beside those just before, when it was alone, and by how much the server's memory has grown.
Exits with 1 where `/health` took more than 0.5 s, the neighbour had less than 0.7 of its speed, or memory grew by more
than 100 MB; a kind that takes slots as other clients do is only reported. All of it stays on this machine's loopback
address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import httpx2

from benchmarks.endpoint.leaving_clients import resident_bytes
from benchmarks.endpoint.servers import Server, endpoint
from drafter.edge.messages import PATH, Open, write
from drafter.embedded import EMBEDDED_BASE
from drafter.source_commit import source_commit
from drafter.text.tokenizers import load_tokenizer, vocabulary_digest

_KEY, _NEIGHBOURS_KEY = "sk-of-the-hostile", "sk-of-the-neighbour"
_CHAT = "/v1/chat/completions"
_HEALTH_SECONDS, _SPEED, _GROWTH = 0.5, 0.7, 100e6
_UNREAD_BUFFER = 4096


@dataclass(frozen=True)
class Kind:
    """What a hostile client does again and again.

    Args:
        first: What it sends on a new connection.
        then: What it sends after that for as long as it can; empty for nothing.
        reads: Whether it reads what comes, until the server closes. One that does not keeps the connection open.
        fair: Whether it takes nobody's slot, so that the neighbour's speed and the memory are held against the limits.
    """

    first: bytes
    then: bytes = b""
    reads: bool = True
    fair: bool = True


def _request(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _keyed(body: object, path: str = _CHAT) -> bytes:
    """Return a request with a key, for one answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _request("POST", path, f"Authorization: Bearer {_KEY}", "Connection: close", body=content)


def _ask(**more: object) -> dict[str, object]:
    return {"model": "model", "messages": [{"role": "user", "content": "Count to a thousand."}], **more}


def _said(content: str) -> dict[str, object]:
    return _ask(messages=[{"role": "user", "content": content}], max_tokens=1)


def _frame(payload: bytes, code: int = 1) -> bytes:
    """Return a client's WebSocket frame, by default of text, under a mask of zeros."""
    size = bytes([128 | len(payload)]) if len(payload) < 126 else bytes([254, *len(payload).to_bytes(2, "big")])
    return bytes([128 | code]) + size + bytes(4) + payload


def kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    key = ("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Authorization: Bearer {_KEY}")
    device = _request("GET", PATH, *upgrade, *key)
    opening = Open("0" * 32, vocabulary_digest(load_tokenizer(EMBEDDED_BASE)), {"prompt": [5] * 20})
    chunked = _request("POST", _CHAT, "Transfer-Encoding: chunked")
    keyed_chunked = _request("POST", _CHAT, f"Authorization: Bearer {_KEY}", "Transfer-Encoding: chunked")
    page = _request("GET", "/page.js")
    unread = _ask(stream=True, n=4, max_tokens=400, logprobs=True, top_logprobs=20)
    return {
        "no key: nothing is sent": Kind(b"", reads=False),
        "no key: half a request": Kind(b"POST /v1/ HTTP/1.1\r\nHost: localhost\r\n", reads=False),
        "no key: headers without an end": Kind(b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-More: of it\r\n" * 4096),
        "no key: trailers without an end": Kind(chunked + b"0\r\n", b"X-More: of the same\r\n" * 4096),
        "no key: one trailer without an end": Kind(chunked + b"0\r\nX-More: ", b"x" * 65536),
        "no key: chunks of one byte": Kind(chunked, b"1\r\nx\r\n" * 8192),
        "no key: a body without an end": Kind(chunked, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        "no key: no HTTP": Kind(b"\x16\x03\x01\x02\x00" * 100),
        "no key: 600 pages asked for, none read": Kind(page * 600, reads=False),
        "no key: pages": Kind(_request("GET", "/page.js", "Connection: close")),
        "no key: the OpenAPI document": Kind(_request("GET", "/openapi.json", "Connection: close")),
        "no key: health": Kind(_request("GET", "/health", "Connection: close")),
        "no key: a wrong key": Kind(
            _request("POST", _CHAT, "Authorization: Bearer sk-wrong", "Connection: close", body=b"{}")
        ),
        "key: trailers without an end": Kind(keyed_chunked + b"0\r\n", b"X-More: of the same\r\n" * 4096),
        "key: a body without an end": Kind(keyed_chunked, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        "key: small mistakes": Kind(_keyed({})),
        "key: a megabyte of wrong values": Kind(_keyed(_ask(messages=[1] * 345_000))),
        "key: a megabyte of unknown parameters": Kind(_keyed(_ask(**{f"p{place}": 1 for place in range(75_000)}))),
        "key: nested lists": Kind(_keyed(b'{"messages":' + b"[" * 500_000)),
        "key: prompts that are too long": Kind(_keyed(_ask(messages=[{"role": "user", "content": "five " * 200_000}]))),
        "key: prompts of too many token ids": Kind(
            _keyed({"model": "model", "prompt": [5] * 340_000}, "/v1/completions")
        ),
        "key: 28,000 empty messages": Kind(_keyed(_ask(messages=[{"role": "user", "content": ""}] * 28_000))),
        "key: metrics": Kind(_request("GET", "/metrics", f"Authorization: Bearer {_KEY}", "Connection: close")),
        "key: long streams that are not read": Kind(_keyed(unread), reads=False, fair=False),
        "key: streams that are read": Kind(_keyed(_ask(stream=True, max_tokens=400)), fair=False),
        "key: sixteen long answers": Kind(
            _keyed(_ask(n=16, max_tokens=1000, logprobs=True, top_logprobs=20, ignore_eos=True)), fair=False
        ),
        "key: sixteen prompts that are echoed": Kind(
            _keyed(
                {"model": "model", "prompt": [[5] * 900] * 16, "echo": True, "logprobs": 5, "max_tokens": 1},
                "/v1/completions",
            ),
            fair=False,
        ),
        "key: sessions of devices, opened and left": Kind(
            device, _frame(write(opening).encode()) + _frame(b"", 8), fair=False
        ),
        "key: noise from devices": Kind(device, b"".join(_frame(bytes([one] * one)) for one in range(32, 126))),
        "key: 31,000 letters": Kind(_keyed(_said("a" * 31_000))),
        "key: 31,000 letters that become more": Kind(_keyed(_said("\ufdfa" * 5_000))),
        "key: 450 special tokens": Kind(_keyed(_said("<|end|>" * 450))),
    }


@dataclass(frozen=True)
class Cost:
    """What a kind cost.

    Args:
        kind: Its name.
        visits: Connections that were opened.
        health: Longest answer of `/health`, in seconds; an error counts as `inf`.
        alone: The neighbour's tokens a second just before.
        beside: Its tokens a second meanwhile.
        growth: Bytes by which the memory of all the server's processes grew, at the most.
        cores: Processor cores that the hostile clients themselves kept busy.
        fair: See `Kind`.
    """

    kind: str
    visits: int
    health: float
    alone: float
    beside: float
    growth: int
    cores: float
    fair: bool

    @property
    def within(self) -> bool:
        """Whether it is within the limits."""
        costly = self.beside < _SPEED * self.alone or self.growth > _GROWTH
        return self.health <= _HEALTH_SECONDS and not (self.fair and costly)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all kinds, or those whose names have a given text in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each kind (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="hostile ones at a time (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure kinds with this text in their names")
    parser.add_argument("--json", type=Path, help="where results are written")
    args = parser.parse_args(arguments)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"{_KEY} operator\n{_NEIGHBOURS_KEY}\n", encoding="ascii")
        settings = ["--keys_file", str(keys), "--engine.num_draft_tokens", "16", "--edge.sessions", "8"]
        with endpoint(None, "ctc", settings) as server:
            _neighbour(server, 5.0)
            for name, kind in kinds().items():
                if args.only in name:
                    costs.append(_measure(server, name, kind, args.seconds, args.connections))
                    print(_line(costs[-1]), flush=True)
    if args.json:
        results = {"commit": source_commit(), "connections": args.connections, "seconds": args.seconds}
        rows = [asdict(cost) | {"within": cost.within} for cost in costs]
        args.json.write_text(json.dumps(results | {"kinds": rows}, indent=1) + "\n", encoding="utf-8")
    if not all(cost.within for cost in costs):
        raise SystemExit(1)


def _line(cost: Cost) -> str:
    speed = f"{cost.beside:.0f} of {cost.alone:.0f} tokens/s"
    mark = "" if cost.within else "  OVER"
    return (
        f"{cost.kind:42} {cost.visits:6} visits by {cost.cores:.2f} cores  /health {cost.health:.2f} s  {speed}  "
        f"{cost.growth / 1e6:+.0f} MB{mark}"
    )


def _measure(server: Server, name: str, kind: Kind, seconds: float, connections: int) -> Cost:
    alone = _neighbour(server, min(seconds / 2, 15.0))
    before = resident_bytes(server.pid)
    visits, cores = multiprocessing.Value("i", 0), multiprocessing.Value("d", 0.0)
    hostile = multiprocessing.Process(target=_hostile, args=(server.address, kind, seconds, connections, visits, cores))
    longest, most, over = [0.0], [before], threading.Event()

    def look() -> None:
        while not over.wait(0.25):
            begun = time.monotonic()
            try:
                httpx2.get(f"{server.address}/health", timeout=30).raise_for_status()
                longest[0] = max(longest[0], time.monotonic() - begun)
            except httpx2.HTTPError:
                longest[0] = float("inf")
            most[0] = max(most[0], resident_bytes(server.pid))

    looking = threading.Thread(target=look)
    hostile.start()
    looking.start()
    beside = _neighbour(server, seconds)
    over.set()
    looking.join()
    hostile.join()
    return Cost(name, visits.value, longest[0], alone, beside, most[0] - before, cores.value, kind.fair)


def _neighbour(server: Server, seconds: float) -> float:
    """Stream answers for some time; tokens a second."""
    body = _ask(stream=True, max_tokens=200, temperature=0, speculation=True, ignore_eos=True)
    headers, tokens, begun = {"Authorization": f"Bearer {_NEIGHBOURS_KEY}"}, 0, time.monotonic()
    with httpx2.Client(base_url=server.address, headers=headers, timeout=seconds + 60) as client:
        while time.monotonic() - begun < seconds:
            try:
                with client.stream("POST", _CHAT, json=body) as response:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            tokens += json.loads(line[6:]).get("speculation", {}).get("tokens", 0)
                        if time.monotonic() - begun >= seconds:
                            break
                if response.status_code != 200:
                    time.sleep(0.2)
            except httpx2.HTTPError:
                time.sleep(0.2)
    return tokens / (time.monotonic() - begun)


def _hostile(
    address: str, kind: Kind, seconds: float, connections: int, visits: Synchronized[int], cores: Synchronized[float]
) -> None:
    """Do what a kind does on some connections at a time, in a process of its own."""
    host, port = address.removeprefix("http://").split(":")
    end = time.monotonic() + seconds
    count = 0

    async def one() -> None:
        nonlocal count
        while time.monotonic() < end:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(max(end - time.monotonic(), 0.01)):
                    count += 1
                    await _visit(host, int(port), kind)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(connections)))

    asyncio.run(all_of_them())
    visits.value, cores.value = count, time.process_time() / seconds


async def _visit(host: str, port: int, kind: Kind) -> None:
    """Connect, and do what a kind does until the server closes."""
    plain = socket.socket()
    plain.setblocking(False)
    if not kind.reads:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_BUFFER)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(plain, (host, port))
        await loop.sock_sendall(plain, kind.first)
        while kind.then:
            await loop.sock_sendall(plain, kind.then)
        if kind.reads:
            while await loop.sock_recv(plain, 1 << 16):
                pass
        else:
            while True:  # until a write finds that the server has closed
                await asyncio.sleep(0.5)
                if plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _closed(plain):
                    return
    finally:
        plain.close()


def _closed(connection: socket.socket) -> bool:
    """Whether the other side has closed, without reading what it sent before."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] != 1  # TCP_ESTABLISHED


if __name__ == "__main__":
    main()

"""Simulated devices over real sockets: their drafting costs time and is right as often as they are told."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2
from websockets.asyncio.client import ClientConnection, connect

from drafter.edge.messages import FROM_SERVER, PATH, Close, Draft, Message, MessageError, Open, Opened, Verified
from drafter.edge.messages import read as read_message
from drafter.edge.messages import write as write_message

_WRONG = 3
"""Token in the place of a right one."""
_MASK = 4
"""Bytes that a frame from a client has more than one from a server."""


@dataclass(frozen=True)
class Simulated:
    """What all devices are like.

    Args:
        nodes: Draft tokens of a message.
        quality: Share of draft tokens that are right.
        draft_seconds: Time that a draft token takes.
        round_trip: Time of the way to the server and back.
    """

    nodes: int
    quality: float
    draft_seconds: float
    round_trip: float


@dataclass(frozen=True)
class Served:
    """What a device got: tokens after the first ones, the seconds of these, and bytes of frames on the wire."""

    tokens: list[int]
    rate: float
    bytes: int


def _frame(text: str, *, masked: bool) -> int:
    size = len(text.encode())
    return size + 2 + (2 if size > 125 else 0) + (_MASK if masked else 0)


async def edge_device(
    address: str,
    digest: str,
    prompt: Sequence[int],
    text: Sequence[int],
    kind: Simulated,
    seed: int,
    all_here: asyncio.Barrier,
) -> Served:
    """Have a text `text` generated behind `prompt`, greedily, drafting for it. All begin once `all_here`.

    While a message is under way the device drafts on, which was worth it if all of its draft was accepted.
    """
    rng, output, sent = random.Random(seed), list[int](), 0
    request = {"prompt": list(prompt), "seed": 0, "temperature": 0, "max_tokens": len(text), "ignore_eos": True}
    socket: ClientConnection
    async with connect(address.replace("http", "ws") + PATH, compression=None, max_size=None) as socket:

        async def ask(message: Message) -> Opened | Verified:
            nonlocal sent
            written = write_message(message)
            await asyncio.sleep(kind.round_trip / 2)
            await socket.send(written)
            read = str(await socket.recv())
            await asyncio.sleep(kind.round_trip / 2)
            sent += _frame(written, masked=True) + _frame(read, masked=False)
            found = read_message(read, FROM_SERVER)
            if not isinstance(found, Opened | Verified):
                raise MessageError(found.code, found.message)
            return found

        opened = await ask(Open(secrets.token_hex(16), digest, request))
        output += opened.tokens
        await all_here.wait()
        begun, first, finished, seq, ready = time.perf_counter(), len(output), opened.finished, 0, 0.0
        sent = 0
        while finished is None:
            seq += 1
            right = text[len(output) : len(output) + kind.nodes]
            tokens = tuple(token if rng.random() < kind.quality else _WRONG for token in right)
            await asyncio.sleep(max(ready - time.perf_counter(), 0))
            # The next draft is ready so much later, if it goes on from this one.
            ready = time.perf_counter() + kind.nodes * kind.draft_seconds
            found = await ask(Draft(seq, len(output), tokens))
            assert isinstance(found, Verified)
            output += found.tokens[len(output) - found.at :]
            finished = found.finished
            if found.accepted < len(tokens) or rng.random() >= kind.quality:
                ready = time.perf_counter() + kind.nodes * kind.draft_seconds
        seconds = time.perf_counter() - begun
        await socket.send(write_message(Close()))
    return Served(output, (len(output) - first) / seconds, sent)


async def plain_client(
    address: str, model: str, prompt: Sequence[int], text: Sequence[int], all_here: asyncio.Barrier
) -> Served:
    """Have the same text streamed."""
    body = {"model": model, "prompt": list(prompt), "seed": 0, "temperature": 0, "max_tokens": len(text)}
    body |= {"ignore_eos": True, "stream": True}
    received, begun = 0, time.perf_counter()
    async with (
        httpx2.AsyncClient(timeout=600) as client,
        client.stream("POST", f"{address}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        waiting = True
        async for line in response.aiter_lines():
            if not line.startswith("data: {") or not json.loads(line.removeprefix("data: "))["choices"]:
                continue
            if waiting:
                waiting = False
                await all_here.wait()
                begun = time.perf_counter()
                continue
            received += len(line) + 2
    return Served([], (len(text) - 1) / (time.perf_counter() - begun), received)

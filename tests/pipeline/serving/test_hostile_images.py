"""One request with hostile images costs nobody else anything: over a socket, with the model that ships and sees."""

from __future__ import annotations

import base64
import hashlib
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any

import psutil
import pytest
from openai import APIStatusError, OpenAI
from PIL import Image

from drafter import SpeculativeLM
from drafter.embedded import EMBEDDED_DIGITS
from pipeline.serving.keys import Keys
from pipeline.serving.replica import Answers
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

MOST_BYTES = 500 << 20
"""Which a request may take of the engine, of the ingress and of what works for them, at any time."""
QUESTION = {"type": "text", "text": "Read the digits."}


def png(width: int, height: int, depth: int = 1, colour: int = 0, chunks: bytes = b"") -> bytes:
    """A black PNG, by a few bytes for each million pixels."""
    row = bytes(1 + (width * depth * (3 if colour == 2 else 1) + 7) // 8)
    packed = zlib.compressobj(9)
    rows = b"".join(packed.compress(row) for _ in range(height)) + packed.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunks + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def film(kind: str, frames: int) -> bytes:
    stream = BytesIO()
    pictures = [Image.new("L", (4, 4), number % 256) for number in range(frames)]
    pictures[0].save(stream, kind, save_all=True, append_images=pictures[1:], duration=1)
    return stream.getvalue()


def bomb(kind: bytes) -> bytes:
    """A part of a PNG that is 64 MiB once it is unpacked."""
    return chunk(kind, b"a\0\0" + zlib.compress(bytes(64 << 20), 9))


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


SMALL = uri(png(64, 64))
LONGEST = 900_000
HOSTILE: dict[str, tuple[Callable[[], list[str]], str | None]] = {
    "thin": (lambda: [uri(png(1, 50_000))] * 32, "times as long as wide"),
    "flat": (lambda: [uri(png(50_000, 1))] * 32, "times as long as wide"),
    "padded": (lambda: [uri(png(350, 70_000))], "MiB of memory"),  # to a square of 4.9 billion pixels
    "large": (lambda: [uri(png(7000, 7000))] * 4, "25,165,824 are the limit"),
    "together": (lambda: [uri(png(3000, 3000))] * 4, "up to this one the prompt's images have 27,000,000 pixels"),
    "largest": (lambda: [uri(png(5016, 5016, 8, 2))], None),
    "many": (lambda: [uri(png(880, 880))] * 32, None),
    "tiny": (lambda: [uri(png(1, 1))] * 32, None),
    "text": (lambda: [uri(png(8, 8, chunks=bomb(b"zTXt")))], "damaged"),
    "profile": (lambda: [uri(png(8, 8, chunks=bomb(b"iCCP")))], "damaged"),
    "film": (lambda: [uri(film("GIF", 3000))], None),
    "webp": (lambda: [uri(film("WEBP", 1000))], None),
    "blanks": (lambda: [SMALL + " " * LONGEST], None),
    "head": (lambda: ["data:" + ";" * LONGEST + ",AA"], "of the form data:image"),
}


@contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """Gives the most bytes, beside those at the start, that this process and those that it has started have held."""
    over = threading.Event()

    def held() -> int:
        total, own = 0, psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                total += process.memory_full_info().pss
        return total

    first = most = held()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, held())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most - first
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def seeing(started_preparations: None) -> Iterator[SpeculativeLM]:
    with SpeculativeLM.from_pretrained(EMBEDDED_DIGITS, "none", max_num_seqs=4) as lm:
        yield lm


@pytest.fixture(scope="module")
def client(seeing: SpeculativeLM) -> Iterator[Callable[[str], OpenAI]]:
    names = ("hostile", "other")
    keys = Keys(tuple(hashlib.sha256(name.encode()).digest() for name in names))
    with served({"digits": Answers(seeing, "replica", PATIENCE)}, keys) as address:
        yield lambda name: OpenAI(base_url=f"{address}/v1", api_key=name, max_retries=0, timeout=PATIENCE)


def answer(client: OpenAI, images: list[str], **more: Any) -> str:
    content: list[Any] = [*({"type": "image_url", "image_url": {"url": one}} for one in images), QUESTION]
    said: list[Any] = [{"role": "user", "content": content}]
    made = client.chat.completions.create(model="digits", messages=said, max_tokens=8, temperature=0, **more)
    return str(made.choices[0].message.content)


def test_hostile_images_cost_their_request_alone(client: Callable[[str], OpenAI]) -> None:
    hostile, other = client("hostile"), client("other")
    wanted, bodies = answer(other, [SMALL]), {name: make() for name, (make, _) in HOSTILE.items()}
    answer(hostile, [SMALL])
    assert max(sum(map(len, images)) for images in bodies.values()) < 1 << 20
    for name, images in bodies.items():
        why = HOSTILE[name][1]
        with peak_bytes() as taken, ThreadPoolExecutor(1) as threads:
            beside = threads.submit(answer, other, [SMALL])
            if why is None:
                assert answer(hostile, images), name
            else:
                with pytest.raises(APIStatusError) as caught:
                    answer(hostile, images)
                assert caught.value.status_code == 400
                assert why in str(caught.value), name
            assert beside.result() == wanted, name
            assert taken() < MOST_BYTES, name

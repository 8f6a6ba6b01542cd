"""Images of clients' chats: those in the web are fetched, and prompts are made of all of them, in turns."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from drafter.errors import RequestError
from drafter.images.opening import named
from drafter.images.processor import ImageProcessor
from drafter.prompt import Prompt
from drafter.requests import Request
from pipeline.io.fetching import fetch_web, is_web
from pipeline.openai.requests import refuse_images
from pipeline.serving.work_limits import LargeWork
from pipeline.settings import ImagesConfig

_FETCHES = 16  # images that are fetched at once. A slow host keeps nothing but other images waiting.
_OF_ONE = 4
"""Those of one client: that many times a request's limit of bytes may be here, until it is known that they are more."""
_HELD = 256 << 20
"""Bytes of what processors have made of the images of a client's requests, after which its next one waits for these."""


class ChatImages:
    """Fetches images for a replica, and says when prompts are made of them.

    Args:
        processor: Its target model's; None if that sees none.
    """

    def __init__(self, config: ImagesConfig, processor: ImageProcessor | None) -> None:
        self.limits, self._hosts, self._sees = config.limits, config.hosts, processor is not None
        self._work = LargeWork()
        if processor is not None and (confined := processor.confined) is not None:
            confined.start()  # which takes seconds: no request waits for it
            self._work = LargeWork(lambda: time.thread_time() + confined.seconds, confined.stop)
        self._held, self._next = Counter[str](), defaultdict[str, asyncio.Lock](asyncio.Lock)  # of each client
        self._fewer = asyncio.Condition()
        self._threads = ThreadPoolExecutor(_FETCHES, "images")
        self._turns = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, _OF_ONE))

    async def fetched(self, addresses: Sequence[str], client: str) -> list[str | bytes]:
        """Return `data:` URIs as they are, and the content of other addresses that a client has sent.

        Raises `OpenAIError` if there are too many, or the model sees none, and `RequestError` if one cannot be fetched.
        """
        refuse_images(len(addresses), self.limits.images if self._sees else None)
        found: list[str | bytes] = []
        left = self.limits.bytes
        for start in range(0, len(addresses), _OF_ONE):
            some = addresses[start : start + _OF_ONE]
            found += await asyncio.gather(*(self._content(one, client, left) for one in some))
            left = max(self.limits.bytes - sum(len(one) for one in found if isinstance(one, bytes)), 0)
        return found

    async def _content(self, address: str, client: str, most: int) -> str | bytes:
        if not is_web(address):
            return address
        fetch = partial(fetch_web, address, most, self._hosts)
        try:
            async with self._turns[client]:
                return await asyncio.get_running_loop().run_in_executor(self._threads, fetch)
        except RequestError as error:
            raise RequestError(f"{named(address)}: {error}") from error

    async def run(self, client: str, make: Callable[[], list[Request]]) -> list[Request]:
        """Return the requests that `make` makes of a client's images, at its turn; `forget` has to follow."""
        async with self._next[client]:
            async with self._fewer:
                await self._fewer.wait_for(lambda: self._held[client] < _HELD)
            requests = await self._work.run(client, make)
            self._held[client] += _input_bytes(requests)
        return requests

    async def forget(self, client: str, requests: Sequence[Request]) -> None:
        """Let others follow requests that have ended, with images or without."""
        if size := _input_bytes(requests):
            self._held[client] -= size
            async with self._fewer:
                self._fewer.notify_all()


def _input_bytes(requests: Sequence[Request]) -> int:
    """Return the bytes of what was made of the images of requests that have them in common."""
    prompt = requests[0].prompt if requests else None
    return sum(array.nbytes for array in prompt.inputs.values()) if isinstance(prompt, Prompt) else 0

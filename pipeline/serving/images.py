"""Images of clients' chats: those in the web are fetched, by threads of their own, before a prompt is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from drafter.errors import RequestError
from drafter.images.opening import named
from pipeline.io.fetching import fetch_web, is_web
from pipeline.openai.errors import bad_request
from pipeline.openai.requests import SEES_NOTHING
from pipeline.settings import ImagesConfig

_FETCHES = 8
"""Images that are fetched at once. A slow host keeps nothing but other images waiting."""
_OF_ONE = 4
"""Those of one request: that many times the limit of bytes may be here, until it is known that they are too many."""


class ChatImages:
    """Fetches images for a replica.

    Args:
        sees: Whether its target model sees.
    """

    def __init__(self, config: ImagesConfig, *, sees: bool) -> None:
        self.limits, self._hosts, self._sees = config.limits, config.hosts, sees
        self._threads = ThreadPoolExecutor(_FETCHES, "images")

    async def fetched(self, addresses: Sequence[str]) -> list[str | bytes]:
        """Return `data:` URIs as they are, and the content of other addresses.

        Raises:
            OpenAIError: There are too many, or the model sees none.
            RequestError: One cannot be fetched.
        """
        if addresses and not self._sees:
            raise bad_request(f"Invalid 'messages': {SEES_NOTHING}.", "messages", "invalid_value")
        if len(addresses) > self.limits.images:
            message = f"Invalid 'messages': up to {self.limits.images} images are allowed, not {len(addresses)}."
            raise bad_request(message, "messages", "array_above_max_length")
        found: list[str | bytes] = []
        left = self.limits.bytes
        for start in range(0, len(addresses), _OF_ONE):
            found += await asyncio.gather(*(self._content(one, left) for one in addresses[start : start + _OF_ONE]))
            left = max(self.limits.bytes - sum(len(one) for one in found if isinstance(one, bytes)), 0)
        return found

    async def _content(self, address: str, most: int) -> str | bytes:
        if not is_web(address):
            return address
        fetch = partial(fetch_web, address, most, self._hosts)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, fetch)
        except RequestError as error:
            raise RequestError(f"{named(address)}: {error}") from error

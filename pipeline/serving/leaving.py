"""Clients that leave before they have their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None if the client leaves before: then `work` is cancelled, wherever it waits.

    Args:
        receive: Of the client's request, whose body has been read.
        work: For the client.
    """
    leaving, working = asyncio.create_task(_left(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait((leaving, working), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (leaving, working):
            task.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

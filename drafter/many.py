"""Many prompts in one call: a request for each, results as they come, and bad prompts as results of their own."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from queue import SimpleQueue
from typing import Any

from tqdm.auto import tqdm

from drafter.engine.handle import Handle
from drafter.errors import QueueFullError, RequestError, shown, unknown_setting
from drafter.prompt import Prompt
from drafter.requests import Generation, Request, SamplingParams, hashed_seed
from drafter.statistics import DecodeCounts

logger = logging.getLogger(__name__)

Sampling = SamplingParams | Mapping[str, Any]


def with_settings(sampling: Sampling | None, settings: Mapping[str, Any]) -> SamplingParams:
    """Return settings with some changed; raise `RequestError` for one that is unknown or cannot be used."""
    if isinstance(sampling, Mapping):
        settings, sampling = {**sampling, **settings}, None
    if not isinstance(sampling, SamplingParams | None):
        raise RequestError(
            "sampling must be SamplingParams, a mapping of its fields, or a sequence of these, one for each prompt, "
            f"not {shown(sampling)}"
        )
    if problem := unknown_setting(settings, SamplingParams):
        raise RequestError(problem)
    return replace(sampling or SamplingParams(), **settings)


def each_with_settings(
    sampling: Sampling | Iterable[Sampling] | None, settings: Mapping[str, Any]
) -> SamplingParams | list[SamplingParams]:
    """Return `with_settings` of the settings of all prompts, or of each one's."""
    if isinstance(sampling, Iterable) and not isinstance(sampling, Mapping | str):
        return [with_settings(one, settings) for one in sampling]
    return with_settings(sampling, settings)


def make_requests(
    encode: Callable[[Any], list[int] | Prompt],
    prompts: Iterable[object],
    sampling: SamplingParams | Sequence[SamplingParams],
    n: int,
    max_length: int,
    prompt_logprobs: int | None = None,
) -> Iterator[Request | Generation]:
    """Yield `n` requests for each prompt, named `0`, `1`, … (`0#0`, `0#1`, … if `n` is not 1), or failures.

    Their seeds differ, so that equal prompts get different texts where tokens are sampled. The first request has the
    seed of its settings, and so has the first sample of a prompt with settings of its own.

    Args:
        encode: Makes token ids of a prompt, or a `Prompt`.
        sampling: The settings of all prompts, or a sequence of one for each.
        max_length: Tokens that prompt and output may have together.
        prompt_logprobs: Of the first request for each prompt; see `Request`.

    Raises:
        RequestError: There are fewer settings than prompts, or more.
    """
    own = not isinstance(sampling, SamplingParams)
    settings: Iterator[SamplingParams] = iter(sampling) if own else repeat(sampling)  # type: ignore[arg-type]
    place, warned = -1, False
    for place, prompt in enumerate(prompts):
        params = next(settings, None)
        if params is None:
            raise RequestError(f"prompt {place} has no settings: give one SamplingParams, or one for each prompt")
        try:
            asked, problem = encode(prompt), None
        except RequestError as error:
            asked, problem = [], error
        made = asked if isinstance(asked, Prompt) else Prompt(asked)
        room = max_length - len(made.ids)
        if not warned and params.max_new_tokens is not None and made.ids and 0 < room < params.max_new_tokens:
            warned = True
            logger.warning(
                "max_new_tokens %s is more than there is room for: prompt and output together may have %s tokens",
                params.max_new_tokens,
                max_length,
            )
        for sample in range(n):
            name = str(place) if n == 1 else f"{place}#{sample}"
            if problem is not None:
                yield failed(Request(made, params, name), problem)
                continue
            at = 0 if own else place
            seed = hashed_seed(params.seed, f"{at}#{sample}") if at or sample else params.seed
            scored = None if sample else prompt_logprobs
            yield Request(made, replace(params, seed=seed), name, prompt_logprobs=scored)
    if own and next(settings, None) is not None:
        raise RequestError(f"there are more settings than the {place + 1} prompts")


class _Ended(SimpleQueue[Handle]):
    """Handles whose requests have ended; `wake` is called after each. It knows no `Completed`, which may be dropped."""

    wake: Callable[[], object] = staticmethod(lambda: None)

    def add(self, handle: Handle) -> None:
        self.put(handle)
        with suppress(RuntimeError):  # the loop is closed
            self.wake()


class Completed:
    """Results in the order in which they are done, by `for` or `async for`.

    At most `most` requests are submitted at a time. A request's own error becomes a result. `close`, or dropping this
    object, cancels unfinished requests.

    Raises:
        EngineError: The engine has failed.
        QueueFullError: Others fill the queue.
    """

    def __init__(
        self, submit: Callable[[Request], Handle], requests: Iterable[Request | Generation], most: int
    ) -> None:
        self._submit, self._requests, self._most = submit, iter(requests), most
        self._next: Request | Generation | None = None  # of `_requests`, while the queue is full
        self._under_way: set[Handle] = set()
        self._ended = _Ended()

    def __iter__(self) -> Iterator[Generation]:
        return self

    def __aiter__(self) -> AsyncIterator[Generation]:
        return self

    def __next__(self) -> Generation:
        try:
            return self._advance() or self._taken(self._ended.get())
        except BaseException:  # such as Ctrl-C: abandoned requests must not delay the next call
            self.close()
            raise

    async def __anext__(self) -> Generation:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        # Before the look at what has ended: what ends after that look wakes the loop.
        self._ended.wake = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while (found := self._advance()) is None:
                await arrived.wait()
                arrived.clear()
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        for handle in self._under_way:
            handle.cancel()
        self._requests, self._next, self._under_way, self._ended = iter(()), None, set(), _Ended()

    __del__ = close

    def _advance(self) -> Generation | None:
        """Submit requests until there is a result; return None if it must be waited for."""
        while self._ended.empty():
            if len(self._under_way) >= self._most:
                return None
            request = self._next = self._next or next(self._requests, None)
            if request is None:
                if not self._under_way:
                    raise StopIteration
                return None
            if isinstance(request, Generation):
                self._next = None
                return request
            try:
                handle = self._submit(request)
            except RequestError as error:
                self._next = failed(request, error)
                continue
            except QueueFullError:
                if not self._under_way:
                    raise
                return None
            self._next = None
            self._under_way.add(handle)
            handle.future.add_done_callback(lambda _, add=self._ended.add, handle=handle: add(handle))  # type: ignore[misc]
        return self._taken(self._ended.get())

    def _taken(self, handle: Handle) -> Generation:
        self._under_way.discard(handle)
        try:
            return handle.result()
        except RequestError as error:
            return failed(handle.request, error)


def in_order(results: Completed, prompts: object, n: int, *, on_error: str, use_tqdm: bool | None) -> list[Generation]:
    """Return results in the order of their prompts; raise the first error as `RequestError` if `on_error` is so."""
    if on_error not in ("return", "raise"):
        raise RequestError(f"on_error must be return or raise, not {shown(on_error)}")
    try:
        count = None if isinstance(prompts, str) else len(prompts) * n  # type: ignore[arg-type]
    except TypeError:  # an iterator, or an array that is one text
        count = None
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    shows = watched and (count is None or count > 1) if use_tqdm is None else use_tqdm
    found: dict[tuple[int, int], Generation] = {}
    try:
        for one in tqdm(results, "prompts", count, disable=not shows):
            if on_error == "raise" and one.error is not None:
                raise RequestError(f"prompt {one.request_id}: {one.error}")
            place, _, sample = one.request_id.partition("#")
            found[int(place), int(sample or 0)] = one
    finally:
        results.close()
    return [found[key] for key in sorted(found)]


def failed(request: Request, error: RequestError) -> Generation:
    return Generation(request.request_id, [], "", "error", len(request.prompt_ids), DecodeCounts(), error=str(error))

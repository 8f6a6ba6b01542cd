"""Many prompts in one call: a request for each, results as they come, and bad prompts as results of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import repeat
from queue import SimpleQueue
from typing import Any, TypeGuard

from tqdm.auto import tqdm

from drafter.engine.sequence import Handle
from drafter.errors import QueueFullError, RequestError, shown
from drafter.requests import Generation, Request, SamplingParams, hashed_seed
from drafter.statistics import DecodeCounts

logger = logging.getLogger(__name__)

_OTHER_WORDS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "sampling_params": "sampling",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "do_sample": "temperature",
    "stream": "SpeculativeLM.stream",
}
"""Our names by those of other libraries."""


def each_prompt(prompts: object) -> Iterator[object]:
    """Yield prompts one by one, as Python objects. A text, a list of token ids or a list of messages is one prompt."""
    found = plain(prompts)
    if isinstance(found, str) or is_tokens(found) or is_chat(found):
        yield found
    elif isinstance(found, Mapping) or hasattr(found, "columns") or not isinstance(found, Iterable):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be a text, a list of token ids, messages, or many of these, not a {kind}")
    else:
        yield from map(plain, found)


def plain(value: object) -> object:
    """Convert an array, a column, or a row of one, to a list."""
    for name in ("to_pylist", "to_list", "tolist"):  # Arrow; Polars and pandas; NumPy and PyTorch
        if callable(convert := getattr(value, name, None)):
            return convert()
    return value


def is_tokens(prompt: object) -> TypeGuard[list[int]]:
    """Return whether a prompt is a non-empty list of integers."""
    return _is_list_of(int, prompt) and not _is_list_of(bool, prompt)


def is_chat(prompt: object) -> TypeGuard[list[Mapping[str, Any]]]:
    """Return whether a prompt is a non-empty list of messages."""
    return _is_list_of(Mapping, prompt)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, kind) for one in value)


def as_chat(prompt: object) -> list[Mapping[str, Any]]:
    """Return messages as they are, and a text as a message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not is_chat(prompt):
        raise RequestError(f"a conversation must be a text or a list of messages, not {shown(prompt)}")
    return list(prompt)


def unknown_setting(given: Iterable[str], kind: type, other_words: Mapping[str, str] | None = None) -> str | None:
    """Return a message for the first name that is no field of the dataclass `kind`; None if all are."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            ours = (other_words or {}).get(name) or next(iter(get_close_matches(name, known, 1)), None)
            return f"unknown setting {name}" + (f": use {ours}" if ours else f"; there are {', '.join(known)}")
    return None


def with_settings(sampling: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """Return settings with some changed; raise `RequestError` for one that is unknown or cannot be used."""
    if problem := unknown_setting(settings, SamplingParams, _OTHER_WORDS):
        raise RequestError(problem)
    if isinstance(stop := settings.get("stop"), str):
        settings = {**settings, "stop": (stop,)}
    return replace(sampling or SamplingParams(), **settings)


def make_requests(
    encode: Callable[[Any], list[int]],
    prompts: Iterable[object],
    sampling: SamplingParams | Sequence[SamplingParams],
    n: int,
    max_length: int,
) -> Iterator[Request | Generation]:
    """Yield `n` requests for each prompt, named `0`, `1`, … (`0#0`, `0#1`, … if `n` is not 1), or failures.

    Their seeds differ, so that equal prompts get different texts where tokens are sampled. The first request has the
    seed of its settings, and so has the first sample of a prompt with settings of its own.

    Args:
        encode: Makes token ids of a prompt.
        sampling: The settings of all prompts, or a sequence of one for each.
        max_length: Tokens that prompt and output may have together.

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
            ids, problem = encode(prompt), None
        except RequestError as error:
            ids, problem = [], error
        room = max_length - len(ids)
        if not warned and params.max_new_tokens is not None and ids and 0 < room < params.max_new_tokens:
            warned = True
            logger.warning(
                "max_new_tokens %s is more than there is room for: prompt and output together may have %s tokens",
                params.max_new_tokens,
                max_length,
            )
        for sample in range(n):
            name = str(place) if n == 1 else f"{place}#{sample}"
            if problem is not None:
                yield failed(Request(ids, params, name), problem)
                continue
            at = 0 if own else place
            seed = hashed_seed(params.seed, f"{at}#{sample}") if at or sample else params.seed
            yield Request(ids, replace(params, seed=seed), name)
    if own and next(settings, None) is not None:
        raise RequestError(f"there are more settings than the {place + 1} prompts")


def as_completed(
    submit: Callable[[Request], Handle], requests: Iterable[Request | Generation], most: int
) -> Generator[Generation]:
    """Submit requests, at most `most` at a time, and yield each result, or the request's own error as a result.

    If the caller stops early, unfinished requests are cancelled.

    Raises:
        EngineError: The engine has failed.
        QueueFullError: Others fill the queue.
    """
    under_way: set[Handle] = set()
    done: SimpleQueue[Handle] = SimpleQueue()

    def finished(*, wait: bool) -> Iterator[Generation]:
        while under_way and (wait or not done.empty()):
            handle, wait = done.get(), False
            under_way.remove(handle)
            try:
                yield handle.result()
            except RequestError as error:
                yield failed(handle.request, error)

    try:
        for request in requests:
            if isinstance(request, Generation):
                yield request
                continue
            yield from finished(wait=len(under_way) >= most)
            while (handle := _submitted(submit, request, alone=not under_way)) is None:
                yield from finished(wait=True)
            if isinstance(handle, Generation):
                yield handle
            else:
                under_way.add(handle)
                handle.future.add_done_callback(lambda _, handle=handle: done.put(handle))  # type: ignore[misc]
        while under_way:
            yield from finished(wait=True)
    finally:  # such as Ctrl-C: abandoned requests must not delay the next call
        for handle in under_way:
            handle.cancel()


def _submitted(submit: Callable[[Request], Handle], request: Request, *, alone: bool) -> Handle | Generation | None:
    """Submit a request; return its failure if it is refused, and None if the queue is full, unless it is `alone`."""
    try:
        return submit(request)
    except RequestError as error:
        return failed(request, error)
    except QueueFullError:
        if alone:
            raise
        return None


def in_order(
    results: Generator[Generation], prompts: object, n: int, *, raises: bool, use_tqdm: bool | None
) -> list[Generation]:
    """Return results in the order of their prompts; raise the first error as `RequestError` if `raises`."""
    count = len(prompts) * n if isinstance(prompts, Sized) and not isinstance(prompts, str) else None
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    shows = watched and (count is None or count > 1) if use_tqdm is None else use_tqdm
    found: dict[tuple[int, int], Generation] = {}
    try:
        for one in tqdm(results, "prompts", count, disable=not shows):
            if raises and one.error is not None:
                raise RequestError(f"prompt {one.request_id}: {one.error}")
            place, _, sample = one.request_id.partition("#")
            found[int(place), int(sample or 0)] = one
    finally:
        results.close()
    return [found[key] for key in sorted(found)]


def failed(request: Request, error: RequestError) -> Generation:
    """Return the result of a request that could not be generated."""
    return Generation(request.request_id, [], "", "error", len(request.prompt_ids), DecodeCounts(), error=str(error))

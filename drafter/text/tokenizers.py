"""A target model's tokeniser: loading, guards around it and its chat template, detokenisation, and stop strings.

The guards make a failure affect one prompt only: a tokeniser in Rust panics, which is no `Exception`; a template may
loop or grow without limit. Nothing here imports model code, which takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from resource import getpagesize
from types import FrameType
from typing import Any

from transformers import AutoTokenizer

from drafter.errors import LoadError, PromptTooLongError, RequestError, first_line, one_line
from drafter.hub import local_only

_COMPOSED = 4  # most characters that a tokeniser's normaliser composes to one, with few exceptions
_SECONDS = 5.0  # limit of a chat template's CPU time; a template of a hundred messages takes some milliseconds
_BYTES = 1 << 30  # limit of the process's memory growth while a template runs
_LOOK_SECONDS = 0.01  # interval of memory checks; doubling with every line of code copies some hundred megabytes in it
_STATM = Path("/proc/self/statm")
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 8  # most tokens of a character: UTF-8 has at most four bytes for one


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Load the tokeniser of a target model, given by hub id or folder; raise `LoadError` if there is none."""
    name = os.path.expanduser(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=local_files_only or local_only(name)
        )
    except Exception as error:  # tokenizers raises bare `Exception` for a damaged file
        raise LoadError(f"no tokenizer at {name!r}: {first_line(error)}") from error


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits of a tokeniser's tokens and ids, added ones included. Equal digests mean equal token ids."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Return the number of characters of a tokeniser's longest token."""
    return max(map(len, tokenizer.get_vocab()))


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokeniser's special tokens, which decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: entry.content for token, entry in added.items() if entry.special}


def refuse_half_characters(prompt: Any) -> None:
    """Raise `RequestError` if a text, or one in messages, has an unpaired surrogate: no tokeniser takes it."""
    try:
        (prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the prompt has half a character: an unpaired surrogate") from error


def refuse_endless(text: str, max_length: float, longest: int) -> None:
    """Raise `PromptTooLongError` for a text that is more than `max_length` tokens of up to `longest` characters."""
    # To tokenise it would take minutes and gigabytes.
    if len(text) > max_length * longest * _COMPOSED:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, but prompt and output together may have {max_length} tokens: "
            "shorten the prompt or raise max_model_len"
        )


def refuse_long(prompt_tokens: int, max_length: int) -> None:
    """Raise `PromptTooLongError` unless `max_length`, of prompt and output together, leaves room for output."""
    if prompt_tokens >= max_length:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but prompt and output together may have {max_length}: "
            "shorten the prompt or raise max_model_len"
        )


def tokenise(tokenizer: Any, texts: list[str], **settings: Any) -> Any:
    """Call a tokeniser; raise `RequestError` if it panics on one of the texts."""
    with refuse_panics():
        return tokenizer(texts, verbose=False, **settings)  # which would warn of long texts: they are refused


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turn a tokeniser's panic in a `with` block into a `RequestError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 makes the class, and gives it to no module
            raise
        raise RequestError(
            f"the tokenizer of the model fails on this text ({one_line(error, 200)}): change or leave out the text"
        ) from error


@contextmanager
def bounded_template() -> Iterator[None]:
    """Limit the CPU time and memory growth of this thread's Python code in a `with` block, or raise `RequestError`.

    Both are checked between two lines of code; a single operation is not interrupted.
    """
    before, start, memory = sys.gettrace(), time.thread_time(), _resident()
    look = start + _LOOK_SECONDS

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal look
        if (now := time.thread_time()) > look:
            look = now + _LOOK_SECONDS
            if now - start > _SECONDS:
                raise RequestError(f"it takes more than {_SECONDS:g} seconds")
            if _resident() - memory > _BYTES:
                raise RequestError(f"it takes more than {_BYTES >> 20} MiB of memory")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _resident() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


class Detokenizer:
    """Decodes a sequence's tokens incrementally, without half characters, at a cost that does not grow with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # The tokens whose text was returned last.
        self._new: list[int] = []  # Tokens after them, whose text has not been returned.

    def push(self, token: int) -> str:
        """Add a token and return the complete characters that it adds."""
        self._new.append(token)
        if len(self._new) > _LONGEST_CHARACTER and self._decode(self._new[-_LONGEST_CHARACTER:]).endswith(_INCOMPLETE):
            return ""
        # Start a few tokens back: some tokenisers put a space between words only when they decode them together.
        before, after = self._decode(self._context), self._decode(self._context + self._new)
        if after == before:  # special tokens have no text
            self._new = self._new[-_LONGEST_CHARACTER:]
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._context, self._new = self._new, []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]


class StopSearch:
    """Finds non-empty stop strings in a text that comes in pieces, in amortised constant time per character and string.

    `cut` is the number of shown characters before the first one found; None if there is none so far.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._searches = [_Search(text) for text in stop]
        self.cut: int | None = None
        self._length = 0
        self._hidden: list[tuple[int, int]] = []  # beginning and length of each hidden piece

    @property
    def found(self) -> bool:
        return self.cut is not None

    @property
    def held_back(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return max((search.matched for search in self._searches), default=0)

    def push(self, piece: str, *, hidden: bool = False) -> None:
        """Add a piece to the text, unless a stop string has been found.

        A hidden piece, such as a special token's text, is not shown, but stop strings are found in it.
        """
        if hidden:
            self._hidden.append((self._length, len(piece)))
        for search in self._searches:
            if end := search.push(piece):
                cut = self._shown(self._length + end - len(search.wanted))
                self.cut = cut if self.cut is None else min(cut, self.cut)
        self._length += len(piece)

    def _shown(self, place: int) -> int:
        """Return the number of shown characters before a position."""
        return place - sum(min(max(place - begin, 0), length) for begin, length in self._hidden)


class _Search:
    """Knuth-Morris-Pratt search; `matched` is the longest prefix of `wanted` with which the text ends."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self._borders = wanted, _borders(wanted)
        self.matched = 0

    def push(self, piece: str) -> int:
        """Add a piece; return the characters of it up to a match's end, after which the search is over, or 0."""
        for place, character in enumerate(piece, start=1):
            self.matched = _next(self.wanted, self._borders, self.matched, character)
            if self.matched == len(self.wanted):
                return place
        return 0


@lru_cache(maxsize=64)  # the choices of a request share strings
def _borders(wanted: str) -> tuple[int, ...]:
    """Return, for each prefix of a string, the length of its longest border."""
    borders = [0]
    for character in wanted[1:]:
        borders.append(_next(wanted, borders, borders[-1], character))
    return tuple(borders)


def _next(wanted: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Return how many characters of `wanted` are matched after one more character of the text."""
    while matched and wanted[matched] != character:
        matched = borders[matched - 1]
    return matched + (wanted[matched] == character)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]

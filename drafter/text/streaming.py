"""Text from tokens as they arrive."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens of a character, at most: UTF-8 has no more than four bytes for one."""


class Detokenizer:
    """Decodes one sequence's tokens incrementally. It never returns half a character.

    A token costs the same wherever in a text it is, also where many before it made no character.

    Args:
        tokenizer: A transformers tokeniser.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # The tokens whose text was returned last.
        self._new: list[int] = []  # Tokens after them, whose text has not been returned.

    def push(self, token: int) -> str:
        """Add a token and return the complete characters that it adds."""
        self._new.append(token)
        if len(self._new) > _LONGEST_CHARACTER and self._half(self._decode(self._new[-_LONGEST_CHARACTER:])):
            return ""
        # Some tokenisers put a space between words only when they decode them together, so decoding begins a few tokens
        # back.
        before, after = self._decode(self._context), self._decode(self._context + self._new)
        if after == before:  # special tokens have no text
            self._new = self._new[-_LONGEST_CHARACTER:]
        if len(after) <= len(before) or self._half(after):
            return ""
        self._context, self._new = self._new, []
        return after[len(before) :]

    @staticmethod
    def _half(text: str) -> bool:
        """Whether a text may end inside a character."""
        return text.endswith(_INCOMPLETE)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]


# ---- Stop strings in a text that grows: each character is looked at once, however long the text and the strings are.


class StopSearch:
    """Looks for stop strings in a text that comes in pieces.

    Args:
        stop: The strings, none of them empty.

    Attributes:
        found: Whether one of them is in the text so far.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._searches = [_Search(text) for text in stop]
        self.found = False

    @property
    def held_back(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max((search.matched for search in self._searches), default=0)

    def push(self, piece: str) -> None:
        """Add a piece to the text; not after one is found."""
        for search in self._searches:
            self.found |= search.push(piece)


class _Search:
    """The search for one string.

    Attributes:
        matched: Length of the longest beginning of the string with which the text ends.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted, self._borders = wanted, _borders(wanted)
        self.matched = 0

    def push(self, piece: str) -> bool:
        """Add a piece to the text; return whether the string is in it, where the search ends."""
        for character in piece:
            self.matched = _next(self._wanted, self._borders, self.matched, character)
            if self.matched == len(self._wanted):
                return True
        return False


@lru_cache(maxsize=64)  # the choices of a request have the same strings
def _borders(wanted: str) -> tuple[int, ...]:
    """Return, for each beginning of a string, the length of the longest shorter beginning with which it ends."""
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
    """Return the part of `text` before the first stop string in it; all of it where there is none."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


# ---- What tells tokenisers apart: token ids mean the same wherever the vocabulary is the same.


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits for a tokeniser's vocabulary: its tokens, added ones included, and their ids."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]

"""Incremental detokenisation, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 8
"""Most tokens of a character: UTF-8 has at most four bytes for one."""


class Detokenizer:
    """Decodes one sequence's tokens incrementally, without half characters. A token's cost does not grow with the
    text.
    """

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

    Attributes:
        cut: The number of shown characters before the first one found; None if there is none so far.
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

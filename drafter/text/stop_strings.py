"""Stop strings in a text that grows: each character is looked at once, however long the text and the strings are.

The search is that of Knuth, Morris and Pratt, "Fast pattern matching in strings" (1977): for each stop string it keeps
how much of its beginning the text ends with. That is also what may not be shown yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopSearch:
    """Looks for stop strings in a text that comes in pieces.

    Args:
        stop: The strings, none of them empty.

    Attributes:
        found: Whether one of them is in the text so far.
        cut: If so, characters that are shown of the text before the first of them; None otherwise.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._searches = [_Search(text) for text in stop]
        self.found = False
        self.cut: int | None = None
        self._length = 0
        self._hidden: list[tuple[int, int]] = []  # beginning and length of each hidden piece

    @property
    def held_back(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max((search.matched for search in self._searches), default=0)

    def push(self, piece: str, *, hidden: bool = False) -> None:
        """Add a piece to the text; not after one is found.

        Args:
            piece: The piece.
            hidden: Whether it is not shown, as the text of a special token: stop strings are found in it all the same.
        """
        if hidden:
            self._hidden.append((self._length, len(piece)))
        for search in self._searches:
            if end := search.push(piece):
                cut = self._shown(self._length + end - search.length)
                self.cut = cut if self.cut is None else min(cut, self.cut)
                self.found = True
        self._length += len(piece)

    def _shown(self, place: int) -> int:
        """Return how many characters before a place are shown."""
        return place - sum(min(max(place - begin, 0), length) for begin, length in self._hidden)


class _Search:
    """The search for one string.

    Attributes:
        matched: Length of the longest beginning of the string with which the text ends.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted, self._borders = wanted, _borders(wanted)
        self.matched = 0

    @property
    def length(self) -> int:
        """Characters of the string."""
        return len(self._wanted)

    def push(self, piece: str) -> int:
        """Add a piece to the text; return how much of it ends with the string, which ends the search, or 0."""
        for place, character in enumerate(piece, start=1):
            self.matched = _next(self._wanted, self._borders, self.matched, character)
            if self.matched == len(self._wanted):
                return place
        return 0


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

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

"""Parts the reasoning of a model from its answer, in a text that comes in pieces or as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts around a model's reasoning; the output begins `inside` it, or may begin with `begin`."""

    begin: str
    end: str
    inside: bool


class _Place(Enum):
    START = auto()  # it is not known yet whether there is reasoning
    REASONING = auto()
    BETWEEN = auto()  # only white space has come since the reasoning's end
    ANSWER = auto()


class ReasoningReader:
    """Parts a text at the first end of reasoning. Marks are in neither part, nor is white space after the reasoning."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._begin, self._end = marks.begin, marks.end
        self._place = _Place.REASONING if marks.inside else _Place.START
        self._held = ""  # what may be part of a mark, or white space before one

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take more text; return the reasoning and the answer as far as they are sure, all after the `last` piece."""
        self._held += text
        reasoning = answer = ""
        if self._place is _Place.START:
            start = self._held.lstrip()
            if start.startswith(self._begin):
                self._place, self._held = _Place.REASONING, start.removeprefix(self._begin)
            elif last or not self._begin.startswith(start):
                self._place = _Place.ANSWER
        if self._place is _Place.REASONING:
            reasoning, mark, rest = self._held.partition(self._end)
            kept = 0 if mark or last else _begun(reasoning, self._end)
            reasoning, self._held = reasoning[: len(reasoning) - kept], rest or reasoning[len(reasoning) - kept :]
            if mark:
                self._place = _Place.BETWEEN
        if self._place is _Place.BETWEEN:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)

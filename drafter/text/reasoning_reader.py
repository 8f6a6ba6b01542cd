"""Parts the reasoning of a model from its answer, in a text that comes in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts around a model's reasoning; the output begins `inside` it, or may begin with `begin`.

    Args:
        guided: The mark stands at the very beginning or there is no reasoning, as guides have it.
        exact: White space behind the reasoning is the answer's.
    """

    begin: str
    end: str
    inside: bool
    guided: bool = False
    exact: bool = False


class _Place(Enum):
    START = auto()  # it is not known yet whether there is reasoning
    REASONING = auto()
    BETWEEN = auto()  # only white space has come since the reasoning's end
    ANSWER = auto()


class ReasoningReader:
    """Parts a text at the first end of reasoning. Marks are in neither part, nor is white space after the reasoning."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._place = _Place.REASONING if marks.inside else _Place.START
        self._held = ""  # what may be part of a mark, or white space before one

    @property
    def reasons(self) -> bool:
        """True inside the reasoning."""
        return self._place is _Place.REASONING

    @property
    def answers(self) -> bool:
        """True once no mark can come."""
        return self._place in (_Place.BETWEEN, _Place.ANSWER)

    @property
    def waits(self) -> bool:
        """True until the answer's first character."""
        return self._place is not _Place.ANSWER

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take more text; return the reasoning and the answer as far as they are sure, all after the `last` piece."""
        begin, end = self._marks.begin, self._marks.end
        self._held += text
        reasoning = answer = ""
        if self._place is _Place.START:
            start = self._held if self._marks.guided else self._held.lstrip()
            if start.startswith(begin):
                self._place, self._held = _Place.REASONING, start.removeprefix(begin)
            elif last or self._marks.guided or not begin.startswith(start):
                self._place = _Place.ANSWER
        if self._place is _Place.REASONING:
            reasoning, mark, rest = self._held.partition(end)
            kept = 0 if mark or last else _begun(reasoning, end)
            reasoning, self._held = reasoning[: len(reasoning) - kept], rest or reasoning[len(reasoning) - kept :]
            if mark:
                self._place = _Place.ANSWER if self._marks.exact else _Place.BETWEEN
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

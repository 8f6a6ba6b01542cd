"""Where two token sequences differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True)
class Span:
    """A run of tokens of one of two sequences.

    Args:
        start: Place of the first token.
        stop: Place behind the last one.
        differs: Whether the other sequence lacks them there.
    """

    start: int
    stop: int
    differs: bool


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first place where two sequences differ, the end of the shorter one included; None if nowhere."""
    for place, (ours, theirs) in enumerate(zip(first, second, strict=False)):
        if ours != theirs:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


def differing_spans(first: Sequence[int], second: Sequence[int]) -> tuple[list[Span], list[Span]]:
    """Return both sequences as spans that they share and spans that they do not, by their longest common runs."""
    ours, theirs = list[Span](), list[Span]()
    for tag, start, stop, other_start, other_stop in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for spans, begin, end in ((ours, start, stop), (theirs, other_start, other_stop)):
            if begin < end:
                spans.append(Span(begin, end, tag != "equal"))
    return ours, theirs

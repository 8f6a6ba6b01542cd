"""Compares two outputs row by row and token by token."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from heapq import nsmallest
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from drafter.statistics import PairedSums
from pipeline.io.column_types import python_rows
from pipeline.output.folder import OutputFolder
from pipeline.report.against.scorers import Scorer
from pipeline.report.rows import open_rows, unreadable


@dataclass(frozen=True)
class Span:
    """Tokens `start … stop - 1` of one of two sequences; `differs` where the other sequence lacks them."""

    start: int
    stop: int
    differs: bool


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first position where two sequences differ, the end of the shorter one included; None if equal."""
    for place, (ours, theirs) in enumerate(zip(first, second, strict=False)):
        if ours != theirs:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


def differing_spans(first: Sequence[int], second: Sequence[int]) -> tuple[list[Span], list[Span]]:
    """Split both sequences into common and differing spans, by their longest common runs."""
    ours, theirs = list[Span](), list[Span]()
    for tag, start, stop, other_start, other_stop in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for spans, begin, end in ((ours, start, stop), (theirs, other_start, other_stop)):
            if begin < end:
                spans.append(Span(begin, end, tag != "equal"))
    return ours, theirs


# Pairs of rows with the same name. Only rows without their counterpart are held in memory.

Row = dict[str, Any]
_BATCH_ROWS = 1024


def rows_of(output: OutputFolder, columns: Sequence[str] | None) -> Iterator[Row]:
    """Read an output's finished rows, in the order of its parts; `columns` None reads all.

    Raises:
        InputError: There are none, or they cannot be read.
    """
    names = None if columns is None else list(columns)
    batches = open_rows(output).to_batches(columns=names, batch_size=_BATCH_ROWS)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(output, error) from error
        if batch is None:
            return
        yield from python_rows(batch)


@dataclass
class RowPairs:
    """Pairs of rows with the same `request_id`. Outputs of the same input have the same order, or nearly.

    Once all pairs have been taken, `only_first` and `only_second` have the rows, by name, that the other output lacks.
    """

    first: Iterator[Row]
    second: Iterator[Row]
    only_first: dict[str, Row] = field(default_factory=dict)
    only_second: dict[str, Row] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Row, Row]]:
        for ours, theirs in zip_longest(self.first, self.second):
            if ours is not None:
                self.only_first[ours["request_id"]] = ours
            if theirs is not None:
                self.only_second[theirs["request_id"]] = theirs
            for row in (ours, theirs):
                name = None if row is None else row["request_id"]
                if name in self.only_first and name in self.only_second:
                    yield self.only_first.pop(name), self.only_second.pop(name)


@dataclass(frozen=True)
class DifferingRow:
    """A row whose tokens first differ at `place`, with its utilities in both outputs; None without a scorer."""

    first: Row
    second: Row
    place: int
    scores: tuple[float, float] | None

    @property
    def name(self) -> str:
        return str(self.first["request_id"])


@dataclass
class Comparison:
    """Result of a comparison of two outputs.

    Args:
        rows: Rows that both have.
        identical: Rows with the same tokens.
        earliest: The differing row with the earliest difference; None if there is none.
        shown: Some of the differing rows, drawn by name.
        utility: Sums of the rows' utilities; None without a scorer.
    """

    rows: int = 0
    identical: int = 0
    only_first: int = 0
    only_second: int = 0
    earliest: DifferingRow | None = None
    shown: list[DifferingRow] = field(default_factory=list)
    utility: PairedSums | None = None

    @property
    def differing(self) -> int:
        return self.rows - self.identical


def compare_rows(first: Iterator[Row], second: Iterator[Row], scorer: Scorer | None, examples: int) -> Comparison:
    """Compare two outputs' rows, which have `request_id`, `token_ids` and the scorer's columns. Few of them are in
    memory.

    Raises:
        InputError: The scorer cannot score a row.
    """
    result = Comparison(utility=None if scorer is None else PairedSums())
    pairs = RowPairs(first, second)
    for ours, theirs in pairs:
        result.rows += 1
        scores = None
        if scorer is not None and result.utility is not None:
            scores = (scorer(ours), scorer(theirs))
            result.utility.add(*scores)
        place = first_difference(ours["token_ids"], theirs["token_ids"])
        if place is None:
            result.identical += 1
            continue
        row = DifferingRow(ours, theirs, place, scores)
        if result.earliest is None or place < result.earliest.place:
            result.earliest = row
        result.shown = nsmallest(
            examples, [*result.shown, row], key=lambda one: (zlib.crc32(one.name.encode()), one.name)
        )
    result.only_first, result.only_second = len(pairs.only_first), len(pairs.only_second)
    return result

"""What two outputs of the same prompts have in common, and what each is worth."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest

from drafter.statistics import PairedSums
from pipeline.compare.row_pairs import Row, RowPairs
from pipeline.compare.scorers import Scorer
from pipeline.compare.token_differences import first_difference


@dataclass(frozen=True)
class DifferingRow:
    """A row whose tokens differ.

    Args:
        first: The row in one output.
        second: The row in the other.
        place: The first token that differs.
        scores: What the two are worth; None without a scorer.
    """

    first: Row
    second: Row
    place: int
    scores: tuple[float, float] | None

    @property
    def name(self) -> str:
        """The row's name."""
        return str(self.first["request_id"])


@dataclass
class Comparison:
    """Two outputs.

    Args:
        rows: Rows that both have.
        identical: How many of them have the same tokens.
        only_first: Rows that only the first output has.
        only_second: Rows that only the second one has.
        earliest: The differing row that differs first, by the place in its text; None if there is none.
        shown: Some of the differing rows, drawn by their names.
        utility: Sums of what the rows are worth; None without a scorer.
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
        """Rows whose tokens differ."""
        return self.rows - self.identical


def compare_rows(first: Iterator[Row], second: Iterator[Row], scorer: Scorer | None, examples: int) -> Comparison:
    """Compare the rows of two outputs; only a few of them are in memory.

    Args:
        first: Rows of one output, with `request_id`, `token_ids` and what the scorer reads.
        second: Rows of the other.
        scorer: Says what a row is worth.
        examples: How many differing rows to keep.

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

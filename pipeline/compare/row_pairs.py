"""The rows of two outputs, in pairs of one name. Rows that wait for their other half are all that is in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from pipeline.io.column_types import python_rows
from pipeline.output.output_folder import OutputFolder
from pipeline.report.row_scan import open_rows, unreadable

Row = dict[str, Any]
_BATCH_ROWS = 1024


def rows_of(output: OutputFolder, columns: Sequence[str] | None) -> Iterator[Row]:
    """Read an output's finished rows, in the order of its parts.

    Args:
        output: The output.
        columns: Names of the columns to read; None for all.

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

    Args:
        first: Rows of one output.
        second: Rows of the other.
        only_first: Rows that the other lacks, by name; complete once all pairs have been taken.
        only_second: Rows that the first one lacks.
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

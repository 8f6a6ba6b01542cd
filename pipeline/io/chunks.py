"""A chunk: some consecutive rows of an input file."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.errors import RowProblem


@dataclass
class Chunk:
    """Consecutive rows of one file.

    Args:
        columns: The rows; a row with a problem is all null.
        numbers: Each row's number in the file, from 1; in files of lines, the line's number.
        problems: By index in the chunk, why a row is no record.
    """

    columns: pa.Table
    numbers: list[int]
    problems: dict[int, RowProblem] = field(default_factory=dict)

"""Problems of rows as a column: each stage adds its own, and rows with one pass by the later stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.io.column_types import replace_column

PROBLEM_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("input", pa.string()), ("attempts", pa.int64())]
)
"""Arrow type of a `RowProblem`; null where a row has none."""


def problem_column(problems: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    """Make the column `problem` of each row's `RowProblem`, given by its fields."""
    return pa.array(problems, PROBLEM_TYPE)


def with_problems(rows: pa.Table, problems: Sequence[Mapping[str, Any] | None]) -> pa.Table:
    """Return `rows` with these problems instead of those that they had."""
    return replace_column(rows, "problem", problem_column(problems))

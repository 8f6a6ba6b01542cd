"""A chunk: some consecutive rows of an input file."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pipeline.errors import RowProblem


class UnreadableValueError(ValueError):
    """A value of a table that the job cannot read: text that is not UTF-8, for instance."""


@dataclass
class Chunk:
    """Consecutive rows of one file.

    Args:
        columns: The rows; a row with a problem is all null.
        numbers: Each row's number in the file, from 1; in files of lines, the line's number.
        problems: By index in the chunk, why a row is no record.
        records: In JSON lines, the rows as they were read. A column's type depends on all its rows, and these do not.
    """

    columns: pa.Table
    numbers: list[int]
    problems: dict[int, RowProblem] = field(default_factory=dict)
    records: list[dict[str, Any]] | None = None

    def values(self, name: str, most_bytes: int | None = None) -> list[Any]:
        """Return each row's value in a column, as JSON has it; None where there is no such column.

        In a table, fields of structs and entries of maps that are null are left out: a file has no other way to say
        that a row lacks them.

        Args:
            name: The column.
            most_bytes: A value that takes more in a table is not read.

        Returns:
            The values, with an `UnreadableValueError` for each that cannot be read.
        """
        if self.records is not None:
            return [record.get(name) for record in self.records]
        if name not in self.columns.column_names:
            return [None] * len(self.numbers)
        column = self.columns.column(name)
        values = _all_values(column) if most_bytes is None or column.nbytes <= most_bytes else None
        return values if values is not None else [_value(column, row, most_bytes) for row in range(len(column))]


def _all_values(column: pa.ChunkedArray) -> list[Any] | None:
    """Return the values of a column; None where one of them cannot be read."""
    try:
        return [_without_nulls(value) for value in column.to_pylist(maps_as_pydicts="strict")]
    except Exception:  # Arrow raises what Python's own types raise, each in its own way
        return None


def _value(column: pa.ChunkedArray, row: int, most_bytes: int | None) -> Any:
    size = column.slice(row, 1).nbytes
    if most_bytes is not None and size > most_bytes:
        return UnreadableValueError(f"it has {size >> 20} MiB, and up to {most_bytes >> 20} MiB are read")
    try:
        return _without_nulls(column[row].as_py(maps_as_pydicts="strict"))
    except UnicodeDecodeError as error:
        return UnreadableValueError(f"it is not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}")
    except Exception as error:  # see `_all_values`
        return UnreadableValueError(f"{type(error).__name__}: {error}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value

"""Samples: a row repeated for several outputs, each with a name and a seed of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from drafter.requests import hashed_seed
from pipeline.io.column_types import free_name, replace_column

SAMPLE_COLUMN = "sample"
"""Column of a row's sample index, from 0."""
SEED_COLUMN = "seed"
"""Column of a row's own seed."""


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of a sample of a row with a seed of its own, which is the first sample's."""
    return hashed_seed(seed, f"#{sample}") if sample else seed


def sample_name(name: str, sample: int) -> str:
    return f"{name}#{sample}"


def row_name(sample: str) -> str:
    """Return the row's name in a name from `sample_name`."""
    return sample.rpartition("#")[0]


def expand(table: pa.Table, counts: Sequence[int], piece_bytes: int) -> Iterator[pa.Table]:
    """Repeat each staged row as often as `counts` says, as rows named `ID#0`, `ID#1`, ….

    The sample index goes to the column `sample`; a column of that name in the input becomes `input_sample`.

    Args:
        piece_bytes: Size of a piece: large rows, often repeated, would not fit in memory.

    Yields:
        All these rows, in pieces.
    """
    sizes = [table.slice(row, 1).nbytes for row in range(table.num_rows)]
    rows: list[int] = []
    samples: list[int] = []
    size = 0
    for row, count in enumerate(counts):
        for sample in range(count):
            rows.append(row)
            samples.append(sample)
            size += sizes[row]
            if size >= piece_bytes:
                yield _repeated(table, rows, samples)
                rows, samples, size = [], [], 0
    if rows:
        yield _repeated(table, rows, samples)


def _repeated(table: pa.Table, rows: Sequence[int], samples: Sequence[int]) -> pa.Table:
    table = table.take(pa.array(rows))
    names = [sample_name(*named) for named in zip(table["request_id"].to_pylist(), samples, strict=True)]
    structs = table["row"].combine_chunks()
    theirs = [field.name for field in structs.type]
    fields = [field.with_name(free_name(field.name, {SAMPLE_COLUMN}, theirs)) for field in structs.type]
    structs = pa.StructArray.from_arrays(
        [*structs.flatten(), pa.array(samples, pa.int64())], fields=[*fields, pa.field(SAMPLE_COLUMN, pa.int64())]
    )
    return replace_column(replace_column(table, "row", structs), "request_id", pa.array(names, pa.string()))

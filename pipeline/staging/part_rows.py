"""A part on its way through Ray Data: one row of the dataset, which holds the part's rows as a list.

Ray Data cuts and merges blocks between rows, never within one, so a part stays whole from its reading to its commit.
`map_batches` requires a batch size beside GPUs: with a batch size of 1, each call gets exactly one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipeline.io.column_types import whole
from pipeline.io.files import Location
from pipeline.staging.named_rows import with_row_type
from pipeline.staging.staged_input import Part, StagedInput


def pack(parts: Iterable[tuple[str, pa.Table]]) -> pa.Table:
    """Make a block of parts, given by their names and rows."""
    return pa.concat_tables([_packed(name, rows) for name, rows in parts])


def _packed(name: str, rows: pa.Table) -> pa.Table:
    structs = pa.StructArray.from_arrays([whole(column) for column in rows.columns], fields=list(rows.schema))
    return pa.table({"part": [name], "rows": pa.ListArray.from_arrays([0, len(structs)], structs)})


def unpack(block: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Read the names and rows of the parts in a block."""
    for name, rows in zip(block["part"].to_pylist(), block["rows"], strict=True):
        yield name, pa.Table.from_struct_array(rows.values)


class StagedParts(Datasource):
    """Ray Data's view of some staged parts: one read task and one block for each.

    A part's rows have the columns `request_id`, `asked`, `row` and `problem`.

    Args:
        staged: The staged input.
        parts: The parts to read.
    """

    def __init__(self, staged: StagedInput, parts: list[Part]) -> None:
        super().__init__()
        self._staged, self._parts = staged, parts

    def estimate_inmemory_data_size(self) -> int | None:
        """Return None: the size is not known."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return one task for each part, whatever the parallelism asked for."""
        return [
            ReadTask(
                _read_task(part.name, self._staged.file(part), self._staged.row_type),
                BlockMetadata(num_rows=1, size_bytes=None, input_files=None, exec_stats=None),
            )
            for part in self._parts
        ]


def _read_task(name: str, file: Location, row_type: pa.StructType) -> Callable[[], list[pa.Table]]:
    """Return what reads a part: it is sent with what it reads, and not with the list of all parts."""
    read = partial(_read_part, name, file, row_type)
    return update_wrapper(read, _read_part)  # Ray warns of large tasks by their names


def _read_part(name: str, file: Location, row_type: pa.StructType) -> list[pa.Table]:
    rows = pa.parquet.read_table(
        file.path, columns=["request_id", "asked", "row", "problem"], filesystem=file.filesystem
    )
    return [pack([(name, with_row_type(rows, row_type))])]

"""Staged parts of an input: their list, their columns, and how Ray Data reads them.

A part is the unit of one engine call, one atomic commit and one retry.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipeline.io.column_types import conform_struct, replace_column, whole
from pipeline.io.files import Location, in_parallel, mend, parquet_rows, read_either, write_twice

STAGED_LIST = "parts.json"  # written last: if it exists, staging is complete
_LIST_KEYS = ("row_type", "rows_per_part", "parts", "source", "revision")
PROBLEM_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("input", pa.string()), ("attempts", pa.int64())]
)
"""Arrow type of a `RowProblem`; null where a row has none."""


@dataclass(frozen=True)
class Part:
    """A staged file.

    Args:
        name: Its name without suffix, shared with the result files.
        nbytes: Its size in memory.
        repeats: For each row, how many equal ones the input has before it, where rows have no ids; empty if none.
    """

    name: str
    rows: int
    nbytes: int = 0
    repeats: tuple[int, ...] = ()


@dataclass(frozen=True)
class StagedInput:
    """The staged rows of an input.

    Args:
        folder: Holds one file per part, with the columns `request_id`, `place` (file and line), `seed_name` (what the
            row's seed follows from, see `with_repeats`), `asked` (the fields of the row that the job reads, as JSON),
            `row` (a struct of the input's columns), `problem` and, for a target model that sees, `images` (their
            addresses) and `image_states`.
        rows_per_part: Rows of each part but the last of a task; 0 where the input will not be staged again.
        source: Identity of the rows: fingerprints of the input's files and of the images that rows name, and the
            selection of rows.
        revision: Number of earlier changes of the input; part names begin with it, from 1 on.
    """

    folder: Location
    parts: tuple[Part, ...]
    row_type: pa.StructType
    rows_per_part: int = 0
    source: Any = None
    revision: int = 0

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def created(self) -> int:
        return int((self.folder / STAGED_LIST).info.mtime_ns // 10**9)

    def without(self, committed: Collection[str]) -> list[Part]:
        return [part for part in self.parts if part.name not in committed]

    def file(self, part: Part) -> Location:
        return self.folder / f"{part.name}.parquet"

    def damaged(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts whose file is missing or incomplete."""
        parts = list(parts)
        rows = in_parallel(parquet_rows, map(self.file, parts))
        return [part for part, found in zip(parts, rows, strict=True) if found != part.rows]

    def request_ids(self) -> Iterator[str]:
        for part in self.parts:
            yield from self.file(part).read_parquet(["request_id"])["request_id"].to_pylist()

    def save(self) -> None:
        """Write the list of parts, which completes staging."""
        saved = {
            "row_type": base64.b64encode(pa.schema(list(self.row_type)).serialize().to_pybytes()).decode(),
            "rows_per_part": self.rows_per_part,
            "parts": [[part.name, part.rows, part.nbytes, part.repeats] for part in self.parts],
            "source": self.source,
            "revision": self.revision,
        }
        write_twice(self.folder / STAGED_LIST, saved)

    @classmethod
    def load(cls, folder: Location) -> StagedInput | None:
        """Load an earlier submission's staging; None if it is incomplete or its list is lost."""
        try:
            saved = read_either(folder / STAGED_LIST, _LIST_KEYS)
        except (FileNotFoundError, ValueError):
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["row_type"])))
        return cls(
            folder,
            tuple(Part(name, rows, nbytes, tuple(repeats)) for name, rows, nbytes, repeats in saved["parts"]),
            pa.struct(list(schema)),
            saved["rows_per_part"],
            saved["source"],
            saved["revision"],
        )


def mend_list(folder: Location) -> None:
    mend(folder / STAGED_LIST, _LIST_KEYS)


def row_name(sample: str) -> str:
    """Return the row's name in the name of a sample, `ID#0`, `ID#1`, …."""
    return sample.rpartition("#")[0]


def problem_column(problems: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    return pa.array(problems, PROBLEM_TYPE)


def with_problems(rows: pa.Table, problems: Sequence[Mapping[str, Any] | None]) -> pa.Table:
    return replace_column(rows, "problem", problem_column(problems))


def with_repeats(rows: pa.Table, part: Part) -> pa.Table:
    """Return a part's rows, of which equal ones of the input have a different `seed_name`: `…`, `…+1`, `…+2`."""
    if not part.repeats:
        return rows
    numbered = zip(rows["seed_name"].to_pylist(), part.repeats, strict=True)
    names = [f"{name}+{number}" if number else name for name, number in numbered]
    return replace_column(rows, "seed_name", pa.array(names, pa.string()))


def with_row_type(table: pa.Table, row_type: pa.StructType) -> pa.Table:
    return replace_column(table, "row", conform_struct(whole(table.column("row")), row_type))


def pack(parts: Iterable[tuple[str, pa.Table]]) -> pa.Table:
    """Make a block for Ray Data: one row per part, with the part's rows as a list."""
    blocks = []
    for name, rows in parts:
        structs = whole(rows.to_struct_array())
        blocks.append(pa.table({"part": [name], "rows": pa.ListArray.from_arrays([0, len(structs)], structs)}))
    return pa.concat_tables(blocks)


def unpack(block: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the name and rows of each part in a block."""
    for name, rows in zip(block["part"].to_pylist(), block["rows"], strict=True):
        yield name, pa.Table.from_struct_array(rows.values)


class StagedParts(Datasource):
    """Ray Data source of staged parts: one read task and one block per part.

    A part's rows have the columns `request_id`, `seed_name`, `asked`, `row`, `problem` and, where there are, `images`.
    """

    def __init__(self, staged: StagedInput, parts: list[Part]) -> None:
        super().__init__()
        self._staged, self._parts = staged, parts

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return one task per part, whatever the parallelism."""
        metadata = BlockMetadata(num_rows=1, size_bytes=None, input_files=None, exec_stats=None)
        return [
            ReadTask(_read_task(part, self._staged.file(part), self._staged.row_type), metadata) for part in self._parts
        ]


def _read_task(part: Part, file: Location, row_type: pa.StructType) -> Callable[[], list[pa.Table]]:
    # It binds the part alone, so that it is not serialized with the list of all parts.
    def read_part() -> list[pa.Table]:
        rows = with_repeats(file.read_parquet(["request_id", "seed_name", "asked", "row", "problem", "images"]), part)
        return [pack([(part.name, with_row_type(rows, row_type))])]

    return read_part

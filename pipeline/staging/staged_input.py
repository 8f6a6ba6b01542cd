"""The staged input: a list of parts, each a Parquet file of named rows.

A part is what one call of an engine takes, what one write commits and what a failure redoes. Names and contents of the
parts follow from the input alone, so that every submission sees the same ones.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from pipeline.io.files import Location, mend, read_either, write_twice
from pipeline.io.table_files import parquet_rows

_READERS = 16

STAGED_LIST = "parts.json"
"""Lists the staged parts. It is written last: where it is, staging is complete."""
STAGED_FORMAT = 2
"""Format 1 has no column `asked`: chat messages of several rows were one Arrow column, and changed one another."""


@dataclass(frozen=True)
class Part:
    """A staged file.

    Args:
        name: Its name without the suffix; the files of its results have the same.
        rows: How many rows it holds.
        nbytes: Their size in memory; 0 where nobody needs it.
    """

    name: str
    rows: int
    nbytes: int = 0


@dataclass(frozen=True)
class StagedInput:
    """The staged rows of an input.

    Args:
        folder: Holds one file for each part, with the columns `request_id`, `place` (file and line), `asked` (what the
            job reads of the row, as JSON), `row` (a struct of the input's columns) and `problem`.
        parts: The files.
        row_type: The type that holds every `row`.
        rows_per_part: Rows of each part but the last of a task; 0 where the input will not be staged again.
        format: See `STAGED_FORMAT`; of an earlier release's parts, the list alone can be used.
        source: What says which rows there are: fingerprints of the input's files, and which rows of them are taken.
        revision: How often the input of the output had changed by then; names of parts begin with it, from 1 on.
    """

    folder: Location
    parts: tuple[Part, ...]
    row_type: pa.StructType
    rows_per_part: int = 0
    format: int = STAGED_FORMAT
    source: Any = None
    revision: int = 0

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def created(self) -> int:
        """When the input was staged, in seconds since 1970."""
        return int((self.folder / STAGED_LIST).info.mtime_ns // 10**9)

    def without(self, committed: Collection[str]) -> list[Part]:
        """Return the parts whose names are not in `committed`."""
        return [part for part in self.parts if part.name not in committed]

    def file(self, part: Part) -> Location:
        """Return where a part is."""
        return self.folder / f"{part.name}.parquet"

    def damaged(self, parts: Iterable[Part]) -> list[Part]:
        """Return those of these parts whose file is not there, or not as a whole."""
        parts = list(parts)
        with ThreadPoolExecutor(_READERS) as pool:
            rows = pool.map(parquet_rows, map(self.file, parts))
            return [part for part, found in zip(parts, rows, strict=True) if found != part.rows]

    def request_ids(self) -> Iterator[str]:
        """Read the `request_id` of every row, in order."""
        for part in self.parts:
            table = pa.parquet.read_table(
                self.file(part).path, columns=["request_id"], filesystem=self.folder.filesystem
            )
            yield from table["request_id"].to_pylist()

    def save(self) -> None:
        """Write the list of parts: from now on the input is staged."""
        row_type = base64.b64encode(pa.schema(list(self.row_type)).serialize().to_pybytes()).decode()
        parts = [[part.name, part.rows, part.nbytes] for part in self.parts]
        saved = {"format": self.format, "row_type": row_type, "rows_per_part": self.rows_per_part, "parts": parts}
        saved |= {"source": self.source, "revision": self.revision}
        write_twice(self.folder / STAGED_LIST, json.dumps(saved))

    @classmethod
    def load(cls, folder: Location) -> StagedInput | None:
        """Read what an earlier submission staged; None if it did not complete it, or if its list is lost."""
        try:
            saved = read_either(folder / STAGED_LIST, _parse)
        except (FileNotFoundError, ValueError):
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["row_type"])))
        parts = tuple(Part(*part) for part in saved["parts"])
        saved_format, source, revision = saved.get("format", 1), saved.get("source"), saved.get("revision", 0)
        return cls(folder, parts, pa.struct(list(schema)), saved["rows_per_part"], saved_format, source, revision)


def mend_list(folder: Location) -> None:
    """Write the list of parts again from its copy, if it is damaged and the copy is not."""
    mend(folder / STAGED_LIST, _parse)


def _parse(text: str) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(text)
    if not isinstance(saved, dict) or not {"row_type", "rows_per_part", "parts"} <= saved.keys():
        raise ValueError("it is no list of parts")
    return saved

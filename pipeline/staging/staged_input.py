"""The staged input: a list of parts, each a Parquet file of named rows.

A part is what one call of an engine takes, what one write commits and what a failure redoes. Names and contents of the
parts follow from the input alone, so that every submission sees the same ones.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet

from pipeline.io.files import Location
from pipeline.output.output_folder import STAGED_LIST


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
        folder: Holds one file for each part, with the columns `request_id`, `place` (file and line), `row` (a struct of
            the input's columns) and `problem`.
        parts: The files.
        row_type: The type that holds every `row`.
    """

    folder: Location
    parts: tuple[Part, ...]
    row_type: pa.StructType

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
        (self.folder / STAGED_LIST).write_text(json.dumps({"row_type": row_type, "parts": parts}))

    @classmethod
    def load(cls, folder: Location) -> StagedInput | None:
        """Read what an earlier submission staged; None if it did not complete it."""
        try:
            saved = json.loads((folder / STAGED_LIST).read_text())
        except FileNotFoundError:
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["row_type"])))
        return cls(folder, tuple(Part(*part) for part in saved["parts"]), pa.struct(list(schema)))

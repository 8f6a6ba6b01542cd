"""Images of an output's rows, found again where the job has staged them: `data/` has the digests alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from pyarrow import fs

from drafter.images.messages import take_images
from pipeline.errors import InputError
from pipeline.generate.row_images import IMAGES, ImageReading, folders_of, staged_images
from pipeline.io.parts import StagedInput
from pipeline.output.folder import OutputFolder
from pipeline.settings import RowImagesConfig

_BODY = "body"
"""Column of a row of an OpenAI batch that has its images."""


@dataclass(frozen=True)
class OutputImages:
    """Where the images of an output's rows are.

    Args:
        filesystem: The output's.
        staged: Paths of the staged files that are there, by part.
        column: The input's column of images; None where messages, or requests, have them.
    """

    filesystem: fs.FileSystem
    staged: Mapping[str, str]
    column: str | None

    def sources(self, names: Sequence[str], parts: Collection[str] | None = None) -> dict[str, list[Any]]:
        """Return the sources of rows' images, as `ImageReading` takes them, by the rows' names.

        Rows are missing whose staged file is gone or damaged. They are looked for in `parts`, by default in all.
        """
        found: dict[str, list[Any]] = {}
        for part in self.staged if parts is None else self.staged.keys() & parts:
            try:
                found |= self._of_part(self.staged[part], names)
            except (pa.ArrowInvalid, OSError):
                continue
        return found

    def _of_part(self, path: str, names: Sequence[str]) -> dict[str, list[Any]]:
        rows = pyarrow.dataset.dataset(path, filesystem=self.filesystem, format="parquet")
        wanted = _BODY if self.column is None else self.column
        columns = {name: pc.field(name) for name in ("request_id", IMAGES)}
        if rows.schema.field("row").type.get_field_index(wanted) >= 0:
            columns["value"] = pc.field("row", wanted)
        found = rows.to_table(columns=columns, filter=pc.field("request_id").isin(list(names)))
        return {row["request_id"]: self._sources(row[IMAGES], row.get("value")) for row in found.to_pylist()}

    def _sources(self, addresses: list[str | None] | None, value: Any) -> list[Any]:
        if self.column is None and addresses and None in addresses:
            return take_images(json.loads(value)["messages"])[1]
        return staged_images(addresses, value)


def images_of_output(output: OutputFolder, run: Mapping[str, Any]) -> OutputImages:
    """Return where the images of an output's rows are; `run` is its `run.json`."""
    staged, there = StagedInput.load(output.staged), set(output.staged.parquets())
    parts = () if staged is None else staged.parts
    files = {part.name: (output.staged / f"{part.name}.parquet").path for part in parts if part.name in there}
    return OutputImages(output.root.filesystem, files, run["config"]["reading"].get("images_column"))


def reading_of_output(run: Mapping[str, Any]) -> ImageReading:
    """Return how an output's images are read again, by its `run.json`."""
    config = RowImagesConfig(**run["config"].get("images", {}))
    try:
        folders, scheme = folders_of(config, run["config"]["input"])
    except InputError:  # it may have moved away since
        folders, scheme = (), ""
    return ImageReading(config.limits, folders, scheme, tuple(config.hosts))

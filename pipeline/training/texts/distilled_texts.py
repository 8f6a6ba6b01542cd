"""Distilled texts: the output of `jobs.distill`, checked before a head learns from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.io.table_files import parquet_rows
from pipeline.output.output_folder import OutputFolder
from pipeline.output.run_file import read_run

COLUMNS = ("request_id", "prompt_token_ids", "token_ids")
"""Columns of a distilled row that are read."""


@dataclass(frozen=True)
class DistilledTexts:
    """The output of one distillation.

    Args:
        uri: Its location as the configuration names it.
        filesystem: Where its files are.
        files: Path and size of its Parquet files.
        base_fingerprint: `BaseModel.fingerprint` of the base that generated the texts.
    """

    uri: str
    filesystem: fs.FileSystem
    files: tuple[tuple[str, int], ...]
    base_fingerprint: str

    @property
    def meaning(self) -> dict[str, Any]:
        """Values that differ for other texts."""
        names = [[path.rpartition("/")[2], size] for path, size in self.files]
        return {"base": self.base_fingerprint, "files": hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}


def open_texts(uri: str) -> DistilledTexts:
    """Open the output of a distillation.

    Raises:
        InputError: It is not the output of a distillation, is not finished, is not lossless, or has no rows.
    """
    output = OutputFolder(locate(uri))
    try:
        run = _read_run(uri, output)
        files = tuple((info.path, info.size) for info in output.data.children() if info.path.endswith(".parquet"))
        rows = sum(_rows(output.data.filesystem, path) for path, _ in files)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"data {uri} cannot be read: {one_line(error)} (submit its distillation again: it makes again what is "
            "damaged)"
        ) from error
    if not rows:
        raise InputError(f"data {uri} has no rows: see {output.errors.path} for why none was generated")
    return DistilledTexts(uri, output.data.filesystem, files, run["base_fingerprint"])


def _read_run(uri: str, output: OutputFolder) -> dict[str, Any]:
    if output.run_file.type != fs.FileType.File:
        raise InputError(f"data {uri} is not the output of jobs.distill: it has no run.json")
    try:
        run = read_run(output.run_file)
        finished, base = run["state"] == "finished", run.get("base_fingerprint")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"data {uri} has a damaged run.json: distil again") from error
    if not finished:
        raise InputError(f"data {uri} is not finished: submit its distillation again")
    if not isinstance(base, str):
        raise InputError(f"data {uri} does not say which base made it: distil again into a new folder")
    # An output from before verifiers were noted does not say it: there was only the exact one.
    if run.get("lossless") is False:
        raise InputError(
            f"data {uri} was decoded by the verifier {run.get('verifier')!r}, which is not lossless: distil again with "
            "the exact one, because a head learns from its own base's answers"
        )
    return run


def _rows(filesystem: fs.FileSystem, path: str) -> int:
    """Check a file's columns and return its number of rows."""
    if parquet_rows(Location(filesystem, path)) is None:
        raise pa.ArrowInvalid(f"{path} is damaged")
    with filesystem.open_input_file(path) as stream:
        file = pa.parquet.ParquetFile(stream)
        schema = file.schema_arrow
        for name in COLUMNS:
            kinds = [field.type for field in schema if field.name == name]
            what = "has no column" if not kinds else "has several columns"
            if len(kinds) == 1:
                if name == "request_id" or (pa.types.is_list(kinds[0]) and pa.types.is_integer(kinds[0].value_type)):
                    continue
                what = f"holds {kinds[0]}, not lists of token ids, in column"
            raise InputError(f"{path} {what} {name!r}: it was not written by jobs.distill")
        return int(file.metadata.num_rows)


def same_base(texts: Iterable[DistilledTexts]) -> tuple[str, ...]:
    """Return the fingerprint of the base that generated all `texts`.

    There are two of them where texts of an earlier release, whose fingerprint is of an earlier scheme, come with newer
    ones. Only the loaded base can tell whether both are its own.

    Raises:
        InputError: Different bases generated them.
    """
    by_base = {one.base_fingerprint: one.uri for one in texts}
    schemes = [base.rpartition("-")[0] for base in by_base]
    if len(set(schemes)) < len(schemes):
        named = ", ".join(f"{uri} ({base})" for base, uri in by_base.items())
        raise InputError(f"data of different bases cannot be used together: {named}")
    return tuple(by_base)

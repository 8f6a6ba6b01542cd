"""Inputs of every format, staged in this process."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from drafter.requests import hashed_seed
from pipeline.generate.row_images import ImageReading
from pipeline.generate.row_keys import content_hash
from pipeline.generate.staging import StagingPlan, stage_files, told_apart
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input
from pipeline.io.parts import StagedInput, StagedParts, unpack
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import write_jsonl


def write_input(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the path's name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".parquet" in path.name:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif ".csv" in path.name or ".tsv" in path.name:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ".tsv" in path.name else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif ".txt" in path.name.lower():
        path.write_text("".join(row["prompt"] + "\n" for row in rows))
    else:
        write_jsonl(path, rows)
    if path.suffix.lower() == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def staged_table(source: Path | str, folder: Path, rows_per_part: int = 3, **settings: Any) -> list[pa.Table]:
    """Stage an input in this process: the rows of each part, as the generation job reads them."""
    return read_parts(staged_input(source, folder, rows_per_part, **settings))


def staged_input(
    source: Path | str,
    folder: Path,
    rows_per_part: int = 3,
    images: ImageReading | None = None,
    **settings: Any,
) -> StagedInput:
    """Stage an input in this process."""
    reading = ReadingConfig(**settings)
    listing = list_input(str(source), reading.format, reading.split, reading.subset)
    plan = StagingPlan(locate(str(folder)), reading, find_prompts(listing, reading), rows_per_part, images=images)
    folder.mkdir(exist_ok=True)
    parts, seen = stage_files(listing, "00000", plan)
    return told_apart(StagedInput(plan.folder, tuple(parts), unify(seen, json_objects=listing.of_json)), plan)


def staged(
    source: Path | str, folder: Path, rows_per_part: int = 3, **settings: Any
) -> tuple[list[list[str]], list[dict[str, Any]], dict[str, str]]:
    """Stage an input in this process: request ids by part, rows, and messages of problems by request id."""
    tables = staged_table(source, folder, rows_per_part, **settings)
    whole = pa.concat_tables(tables).to_pylist()
    problems = {row["request_id"]: row["problem"]["message"] for row in whole if row["problem"] is not None}
    return [table["request_id"].to_pylist() for table in tables], [row["row"] for row in whole], problems


def content_seed(seed: int, **asked: Any) -> int:
    """The seed of a row without an id, by what it asks for."""
    return hashed_seed(seed, content_hash(json.dumps(asked, ensure_ascii=False)).hex())


def read_parts(staged: StagedInput) -> list[pa.Table]:
    """Read the rows of all parts, as Ray's tasks do."""
    tasks = StagedParts(staged, list(staged.parts)).get_read_tasks(1)
    return [rows for task in tasks for block in task() for _, rows in unpack(block)]

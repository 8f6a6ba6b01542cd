"""Outputs of a generation job, made by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from drafter.statistics import DecodeCounts, statistics_columns
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import ERROR_SCHEMA

BEGUN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
"""When the first row of an output was finished, unless the row says something else."""


def write_output(folder: Path, parts: list[list[dict[str, Any]]], errors: list[dict[str, Any]]) -> OutputFolder:
    """An output with these rows: `accepted` is what each step accepted, the rest has defaults."""
    (folder / "data").mkdir(parents=True)
    (folder / "errors").mkdir()
    for number, rows in enumerate(parts):
        full = []
        for row in rows:
            counts = DecodeCounts()
            for accepted in row["accepted"]:
                counts.record_step(emitted=accepted + 1, accepted=accepted, drafted=4)
            tokens = counts.num_output_tokens
            full.append(
                {
                    "request_id": row["id"],
                    "category": row.get("category"),
                    "prompt_token_ids": [20, 21],
                    "token_ids": row.get("token_ids", [30] * tokens),
                    "finish_reason": "length",
                    "num_prompt_tokens": 2,
                    "num_cached_tokens": 0,
                    "num_output_tokens": tokens,
                    **statistics_columns(counts),
                    "generation_seconds": row.get("seconds", 1.0),
                    "finished_at": BEGUN + timedelta(seconds=row.get("at", 0)),
                    **row.get("marks", {}),
                }
            )
        pa.parquet.write_table(pa.Table.from_pylist(full), folder / "data" / f"{number}.parquet")
    if errors:
        table = pa.Table.from_pylist(errors, schema=ERROR_SCHEMA)
        pa.parquet.write_table(table, folder / "errors" / "0.parquet")
    return OutputFolder(locate(str(folder)))

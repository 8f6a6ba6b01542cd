"""Which rows of an output are generated again, and what each of them asked for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from drafter.requests import Request, SamplingParams
from pipeline.generate.row_sampling import row_sampling
from pipeline.openai.batch import LINE_FIELDS, parse_line
from pipeline.output.output_folder import OutputFolder
from pipeline.report.row_scan import open_rows, unreadable

_BATCH_COLUMNS = set(LINE_FIELDS)
"""Rows with these are lines of an OpenAI batch, whose requests bring their own settings."""
_READ_COLUMNS = {"request_id", "prompt_token_ids", "token_ids", "seed"}


@dataclass(frozen=True)
class RepeatedRow:
    """A row that is generated again.

    Args:
        request: What it asked for.
        token_ids: What the output says came of it.
    """

    request: Request
    token_ids: list[int]


def rows_to_repeat(output: OutputFolder, run: Mapping[str, Any], share: float) -> Iterator[RepeatedRow]:
    """Draw rows of an output by their names, at least one, so that each audit of it draws the same ones.

    Args:
        output: The output.
        run: Its `run.json`.
        share: Of its finished rows.

    Raises:
        InputError: The rows cannot be read.
    """
    dataset, config = open_rows(output), run["config"]
    column = config["reading"]["sampling_column"]
    try:
        names = dataset.to_table(columns=["request_id"])["request_id"].to_pylist()
        count = math.ceil(share * len(names))
        drawn = nsmallest(count, names, key=lambda name: (zlib.crc32(name.encode()), name))
        rows = dataset.to_table(
            # Of the input's columns only those that say what a row asked for: others may hold what Python has not.
            columns=[name for name in dataset.schema.names if name in {*_READ_COLUMNS, *_BATCH_COLUMNS, column}],
            filter=pc.field("request_id").isin(drawn),
        ).to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(output, error) from error
    defaults = SamplingParams(**config["sampling"])
    for row in rows:
        request = Request(row["prompt_token_ids"], _sampling(row, defaults, column), row["request_id"])
        yield RepeatedRow(request, row["token_ids"])


def _sampling(row: dict[str, Any], defaults: SamplingParams, column: str) -> SamplingParams:
    """The settings that a row was generated with; log-probabilities change no token and are left out."""
    if row.keys() >= _BATCH_COLUMNS:
        # Requests draw unless they say otherwise; outputs of earlier releases do not record that.
        settings = parse_line(row).sampling(replace(defaults, temperature=defaults.temperature or 1.0))
    else:
        settings = row_sampling(defaults, row["request_id"], row, column)
    return replace(settings, seed=row["seed"], logprobs=None)

"""The texts of rows that are in a job's output already."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from drafter.drafters.text_queue import Text
from drafter.errors import one_line
from pipeline.io.files import Location

_COLUMNS = ("prompt_token_ids", "token_ids")


def earlier_texts(data: Location, tokens: int) -> list[Text]:
    """Return prompts with their answers, oldest first: the newest ones that have up to `tokens` tokens together.

    Files that cannot be read are left out: drafts are worth no failure.

    Args:
        data: The folder of the output's Parquet files.
        tokens: Tokens of all texts together.
    """
    found: list[Text] = []
    for text in _newest_first(data):
        tokens -= len(text)
        if tokens < 0:
            break
        found.append(text)
    return found[::-1]


def _newest_first(data: Location) -> Iterator[Text]:
    try:
        files = [info for info in data.children() if info.path.endswith(".parquet")]
    except OSError as error:
        print(f"{data.path} is not remembered: {one_line(error)}", file=sys.stderr, flush=True)
        return
    for info in sorted(files, key=lambda info: (info.mtime_ns or 0, info.path), reverse=True):
        try:
            with data.filesystem.open_input_file(info.path) as stream:
                file = pa.parquet.ParquetFile(stream)
                if not set(_COLUMNS) <= set(file.schema_arrow.names):
                    continue
                for group in reversed(range(file.num_row_groups)):
                    yield from _texts(file.read_row_group(group, list(_COLUMNS)))[::-1]
        except (OSError, pa.ArrowException) as error:  # it may also have been merged into another one meanwhile
            print(f"{info.path} is not remembered: {one_line(error)}", file=sys.stderr, flush=True)


def _texts(rows: pa.Table) -> list[Text]:
    """Return each row's prompt and answer as one text."""
    prompts, answers = (_split(rows[name]) for name in _COLUMNS)
    return [np.concatenate(parts) for parts in zip(prompts, answers, strict=True)]


def _split(column: pa.ChunkedArray) -> list[npt.NDArray[np.int32]]:
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    flat = pa.compute.list_flatten(column).to_numpy().astype(np.int32)
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []

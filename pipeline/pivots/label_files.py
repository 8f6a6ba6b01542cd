"""Rejected tokens and their labels as Parquet files, which appear as a whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from drafter.errors import one_line
from drafter.verifiers.lenient.pivot_classifier import PivotFeatures
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.pivots.rejected_tokens import BaseFacts
from pipeline.pivots.rollouts import Label

_BASE = b"base"


def write_table(table: pa.Table, file: Path, base: BaseFacts) -> None:
    """Write tokens, and of which base they are."""
    described = table.replace_schema_metadata({_BASE: json.dumps(asdict(base))})
    with locate(str(file)).open_whole() as stream:
        pa.parquet.write_table(described, stream, compression="zstd")


def read_table(file: Path) -> tuple[pa.Table, BaseFacts]:
    """Read what `write_table` wrote.

    Raises:
        InputError: It is damaged.
    """
    try:
        table = pa.parquet.read_table(file)
        return table, BaseFacts(**json.loads(table.schema.metadata[_BASE]))
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({one_line(error)}): delete it and submit the job again") from error


def is_held_out(name: str, share: float) -> bool:
    """Whether a prompt is held out: by its name alone, so that all tokens of a prompt are on one side."""
    return zlib.crc32(f"held out {name}".encode()) < share * 2**32


def labelled(tokens: pa.Table, labels: Sequence[Label], held_out: float) -> pa.Table:
    """Return the tokens that have labels, with them, without the long prefixes.

    Args:
        tokens: Rows of `REJECTION_TYPE`.
        labels: Of some of them.
        held_out: Share of the prompts that are.
    """
    table = tokens.take([label.number for label in labels]).drop_columns(["prefix", "left"])
    names = table["request_id"].to_pylist()
    columns = {
        "utility_with": pa.array([label.utility_with for label in labels], pa.float64()),
        "utility_without": pa.array([label.utility_without for label in labels], pa.float64()),
        "rollouts_with": pa.array([label.rollouts_with for label in labels], pa.int64()),
        "rollouts_without": pa.array([label.rollouts_without for label in labels], pa.int64()),
        "pivot": pa.array([label.pivot for label in labels], pa.bool_()),
        "held_out": pa.array([is_held_out(name, held_out) for name in names], pa.bool_()),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def features_of(labels: pa.Table) -> tuple[PivotFeatures, Tensor]:
    """Return what a classifier sees of R labelled tokens, and `[R]` whether they are pivots."""
    # Numbers of all rows at once: as Python's they would take eight times the memory.
    hidden = np.concatenate([chunk.flatten().to_numpy() for chunk in labels["hidden"].chunks]).reshape(len(labels), -1)
    entropy, probability, pivots = (
        torch.from_numpy(labels[name].to_numpy().copy()) for name in ("entropy", "probability", "pivot")
    )
    return PivotFeatures(torch.from_numpy(hidden), entropy, probability), pivots

"""Finds rejected draft tokens of finished rows by decoding them once more, and stores tokens and labels as Parquet."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import one_line
from drafter.evaluation.decoders import decode_all
from drafter.methods.pad.classifier import PivotFeatures, published_layer
from drafter.methods.pad.training import RecordingVerifier, Rejection
from drafter.target.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.pad.rollouts import Label
from pipeline.report.audit import RepeatedRow

_BASE = b"base"


def write_table(table: pa.Table, file: Path, base: BaseFacts) -> None:
    """Write tokens and the facts of their target model; the file appears as a whole."""
    described = table.replace_schema_metadata({_BASE: json.dumps(asdict(base))})
    with locate(str(file)).open_whole() as stream:
        pa.parquet.write_table(described, stream, compression="zstd")


def read_table(file: Path) -> tuple[pa.Table, BaseFacts]:
    """Read a file of `write_table`.

    Raises:
        InputError: It is damaged.
    """
    try:
        table = pa.parquet.read_table(file)
        return table, BaseFacts(**json.loads(table.schema.metadata[_BASE]))
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({one_line(error)}): delete it and submit the job again") from error


def is_held_out(name: str, share: float) -> bool:
    """Return whether a prompt is held out. Depends on its name alone, so all its tokens are on one side."""
    return zlib.crc32(f"held out {name}".encode()) < share * 2**32


def labelled(tokens: pa.Table, labels: Sequence[Label], held_out: float) -> pa.Table:
    """Join tokens, rows of `REJECTION_TYPE` without their long prefixes, with the labels of some of them."""
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
    """Return the classifier's features of R labelled tokens, and `[R]` whether they are pivots."""
    # Arrays, not lists: Python's numbers would take eight times the memory.
    hidden = np.concatenate([chunk.flatten().to_numpy() for chunk in labels["hidden"].chunks]).reshape(len(labels), -1)
    entropy, probability, pivots = (
        torch.from_numpy(labels[name].to_numpy().copy()) for name in ("entropy", "probability", "pivot")
    )
    return PivotFeatures(torch.from_numpy(hidden), entropy, probability), pivots


# Search for rejected tokens.

_ROWS_AT_ONCE = 256

REJECTION_TYPE = pa.schema(
    [
        ("request_id", pa.string()),
        ("place", pa.int64()),
        ("left", pa.int64()),
        ("prefix", pa.list_(pa.int32())),
        ("rejected", pa.int32()),
        ("chosen", pa.int32()),
        ("rejected_ends", pa.bool_()),
        ("chosen_ends", pa.bool_()),
        ("entropy", pa.float64()),
        ("probability", pa.float64()),
        ("hidden", pa.list_(pa.float32())),
    ]
)
"""A row for each token: the output's row and the position in its answer, tokens that may still follow, prompt and
answer before it, the token and the target model's own choice, whether each ends the text, and the classifier's
features."""


@dataclass(frozen=True)
class BaseFacts:
    """The target model, as far as a classifier must know it; `layer` is the layer whose output is in `hidden`."""

    name: str
    fingerprint: str
    layer: int


def rejected_tokens(
    model: str,
    drafter: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    rows: Sequence[RepeatedRow],
    most: int,
    threads: int,
) -> Iterator[BaseFacts | tuple[int, pa.Table]]:
    """Decode rows once more; yield the target model's facts, then for each batch its finished rows and rejected tokens.

    Args:
        rows: Rows with the answers of exact decoding.
        most: Most rejected tokens of a row.

    Raises:
        LoadError: A model cannot be loaded.
    """
    torch.set_num_threads(threads)
    base = load_base(model, **loading)
    tokenizer = load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
    layer = published_layer(base.num_layers)
    yield BaseFacts(base.name, base.fingerprint, layer)
    config = EngineConfig(**engine, max_queue=_ROWS_AT_ONCE)
    # Draft even where it does not pay.
    nodes = useful_nodes(base.device) if config.num_draft_tokens == "auto" else config.num_draft_tokens
    proposing = load_drafter(drafter, base, nodes)
    recorder = RecordingVerifier(layer)
    running = Engine(base, proposing, tokenizer, replace(config, num_draft_tokens=nodes), verifier=recorder)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        decode_all(running, [replace(row.request, timeout=None) for row in some])
        found = list(tokens_of(some, recorder.take(), base.eos_token_ids, most))
        yield first + len(some), pa.Table.from_pylist(found, schema=REJECTION_TYPE)


def tokens_of(
    rows: Sequence[RepeatedRow], noted: Sequence[Rejection], ends: frozenset[int], most: int
) -> Iterator[dict[str, Any]]:
    """Assign rejections to rows, and draw at most `most` of each row.

    A rejection is a row's if its text continues as the row does, with the target model's choice after it; others are
    ignored. The draw depends on names and positions, so it is the same each time.
    """
    by_prompt: dict[tuple[int, ...], list[RepeatedRow]] = defaultdict(list)
    for row in rows:
        by_prompt[tuple(row.request.prompt_ids)].append(row)
    found: dict[str, dict[int, tuple[RepeatedRow, Rejection]]] = defaultdict(dict)
    for one in noted:
        prompt, said = one.prefix[: one.prompt_tokens], one.prefix[one.prompt_tokens :]
        for row in by_prompt.get(tuple(prompt), []):
            place = len(said)
            if _left(row, place) > 0 and row.token_ids[: place + 1] == [*said, one.chosen]:
                found[row.request.request_id][place] = row, one
    for name, places in found.items():
        drawn = sorted((zlib.crc32(f"{name}:{place}".encode()), place) for place in places)[:most]
        yield from (_as_row(*places[place], place, ends) for place in sorted(place for _, place in drawn))


def _left(row: RepeatedRow, place: int) -> int:
    return row.request.sampling.over().max_new_tokens - place - 1


def _as_row(row: RepeatedRow, one: Rejection, place: int, ends: frozenset[int]) -> dict[str, Any]:
    stops = frozenset() if row.request.sampling.ignore_eos else ends
    return {
        "request_id": row.request.request_id,
        "place": place,
        "left": _left(row, place),
        "prefix": one.prefix,
        "rejected": one.rejected,
        "chosen": one.chosen,
        "rejected_ends": one.rejected in stops,
        "chosen_ends": one.chosen in stops,
        "entropy": one.entropy,
        "probability": one.probability,
        "hidden": one.hidden.tolist(),
    }

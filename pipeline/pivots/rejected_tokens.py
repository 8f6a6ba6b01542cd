"""Rejected draft tokens of finished rows: the rows are decoded once more, exactly, and rejections are noted."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch

from drafter.base.loading import load_base, load_tokenizer
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.evaluation.decoders import decode_all
from drafter.pivots.rejections import RecordingVerifier, Rejection
from drafter.verifiers.lenient.pivot_classifier import published_layer
from pipeline.compare.repeated_rows import RepeatedRow

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
"""A row for each token: the row of the output and the place in its answer, tokens that may still follow, prompt and
answer before it, the token and the base's own choice, whether each ends the text, and what a classifier sees."""


@dataclass(frozen=True)
class BaseFacts:
    """The base, as far as a classifier must know it.

    Args:
        name: Hub id or folder.
        fingerprint: See `drafter.base.fingerprint`.
        layer: The layer whose output is in `hidden`.
    """

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
    """Yield what the base is, and then how many rows are done and the tokens found in the last of them.

    Args:
        model: Hub id or folder of the base.
        drafter: Name of the drafter.
        loading: How they are loaded: further arguments of `load_base`.
        engine: The engine's settings; see `EngineSettings`.
        rows: Rows, and the answers that exact decoding gave.
        most: Rejected tokens of a row at most.
        threads: CPU threads.

    Raises:
        LoadError: A model cannot be loaded.
    """
    torch.set_num_threads(threads)
    base = load_base(model, **loading)
    tokenizer = load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
    layer = published_layer(base.num_layers)
    yield BaseFacts(base.name, base.fingerprint, layer)
    config = EngineConfig(**engine, max_queue=_ROWS_AT_ONCE)
    # Drafts are wanted here even where they would not pay.
    nodes = useful_nodes(base.device) if config.nodes == "auto" else config.nodes
    proposing = load_drafter(drafter, base, nodes)
    recorder = RecordingVerifier(layer)
    running = Engine(base, proposing, tokenizer, replace(config, nodes=nodes), verifier=recorder)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        decode_all(running, [replace(row.request, timeout=None) for row in some])
        found = list(tokens_of(some, recorder.take(), base.eos_token_ids, most))
        yield first + len(some), pa.Table.from_pylist(found, schema=REJECTION_TYPE)


def tokens_of(
    rows: Sequence[RepeatedRow], noted: Sequence[Rejection], ends: frozenset[int], most: int
) -> Iterator[dict[str, Any]]:
    """Give rejections to the rows that they are of, and draw some of each row.

    A rejection is a row's if its text goes on like the row's, and after it the row has what the base chose. The draw
    goes by names and places, and is the same each time.

    Args:
        rows: The rows.
        noted: Rejections of all of them, and perhaps of texts that nobody has asked for.
        ends: Tokens that end a text.
        most: Rejections of a row at most.
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
    """Tokens that may still follow the one in a place of a row's answer."""
    return row.request.sampling.over().max_new_tokens - place - 1


def _as_row(row: RepeatedRow, one: Rejection, place: int, ends: frozenset[int]) -> dict[str, Any]:
    """A row of `REJECTION_TYPE`."""
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

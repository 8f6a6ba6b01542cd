"""Rejected draft tokens: found by decoding answers once more, continued with and without each, labelled by scores."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import one_line
from drafter.evaluation.decoders import decode_all
from drafter.methods.pad.method import BaseOfClassifier, PivotFeatures, published_layer
from drafter.methods.pad.training import RecordingVerifier, Rejection, is_pivot
from drafter.requests import SamplingParams, hashed_seed
from drafter.text.detokenizer import cut_at_stop
from pipeline.errors import InputError
from pipeline.evaluation.measuring import load_models
from pipeline.io.files import locate
from pipeline.report.audit import RepeatedRow
from pipeline.report.scorers import Scorer, scores_of

_BASE = b"base"
_ROWS_AT_ONCE = 256
_LABEL_TYPE = pa.schema(
    {
        "utility_with": pa.float64(),  # mean utility of answers with the rejected token
        "utility_without": pa.float64(),
        "rollouts_with": pa.int64(),
        "rollouts_without": pa.int64(),
        "pivot": pa.bool_(),
        "held_out": pa.bool_(),
    }
)
_TOKEN = {"with": "rejected", "without": "chosen"}
_SEEDS = 2**31
_OF_A_REQUEST = frozenset({"max_new_tokens", "temperature", "seed", "logprobs"})
"""Settings that a row may have of its own: a continuation brings them itself, or they change none of its tokens."""

REJECTION_TYPE = pa.schema(
    {
        "request_id": pa.string(),
        "place": pa.int64(),  # position in the row's answer
        "left": pa.int64(),  # tokens that may still follow
        "prefix": pa.list_(pa.int32()),  # prompt and answer before it
        "rejected": pa.int32(),
        "chosen": pa.int32(),
        "rejected_ends": pa.bool_(),  # the text
        "chosen_ends": pa.bool_(),
        "entropy": pa.float64(),
        "probability": pa.float64(),
        "hidden": pa.list_(pa.float32()),
    }
)


def rejected_tokens(
    model: str,
    drafter: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    rows: Sequence[RepeatedRow],
    most: int,
    threads: int,
) -> Iterator[BaseOfClassifier | tuple[int, pa.Table]]:
    """Decode rows once more; yield the target model, then for each batch the rows done and its rejected tokens.

    Of each row at most `most` are drawn. Raises `LoadError` if a model cannot be loaded.
    """
    base, tokenizer = load_models(model, loading, threads)
    layer = published_layer(base.num_layers)
    yield BaseOfClassifier(base.name, base.fingerprint, layer)
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
    """Assign rejections to rows, and draw at most `most` of each row by its name and their positions.

    A rejection is a row's if its text continues as the row does, with the target model's choice after it.
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


def refuse_own_settings(rows: Iterable[RepeatedRow], job: SamplingParams) -> None:
    """Refuse rows whose continuations would be made by other settings than their answers.

    Continuations are requests of one job, and an OpenAI body cannot express all settings of a row.
    """
    common = asdict(job.over())
    for row in rows:
        own = asdict(row.request.sampling.over())
        if names := [name for name in common if name not in _OF_A_REQUEST and own[name] != common[name]]:
            flags = ", ".join(f"--sampling.{name}" for name in names)
            raise InputError(
                f"row {row.request.request_id} has sampling settings of its own ({', '.join(names)}), but "
                f"continuations have the job's: leave them out of the rows and give them to all by {flags}, or leave "
                "such rows out"
            )


def requests_of(tokens: Iterable[Mapping[str, Any]], rollouts: int, temperature: float) -> Iterator[str]:
    """Yield lines of an OpenAI batch: texts that continue with each rejected token, and with the target model's choice.

    A token that ends the text needs no continuation.
    """
    for number, token in enumerate(tokens):
        for side, kind in _TOKEN.items():
            if token[f"{kind}_ends"]:
                continue
            body = {
                "model": "base",
                "prompt": [*token["prefix"], token[kind]],
                "max_tokens": token["left"],
                "n": rollouts,
                "temperature": temperature,
                "seed": hashed_seed(number, side) % _SEEDS,
            }
            line = {"custom_id": f"{number}-{side}", "method": "POST", "url": "/v1/completions", "body": body}
            yield json.dumps(line) + "\n"


def continuations_by_side(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], list[NDArray[np.int32]]]:
    """Return all answers to `requests_of` by token and side. They are arrays, because all are in memory at once."""
    found: dict[tuple[int, str], list[NDArray[np.int32]]] = defaultdict(list)
    for row in rows:
        number, _, side = row["custom_id"].partition("-")
        found[int(number), side].append(np.array(row["token_ids"], np.int32))
    return found


def labels_of(
    tokens: Sequence[Mapping[str, Any]],
    continuations: Mapping[tuple[int, str], Sequence[NDArray[np.int32]]],
    answers: Mapping[str, Mapping[str, Any]],
    scorer: Scorer,
    decode: Callable[[list[int]], str],
    stop: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield a label, with the token's index as `number`, for each token that has answers on both sides.

    `answers` are rows of exact decoding, by name. Raises `InputError` if the scorer cannot score an answer, or gives a
    negative score.
    """
    for number, token in enumerate(tokens):
        answer = answers[token["request_id"]]
        scores: dict[str, list[float]] = {}
        for side, kind in _TOKEN.items():
            begin = [*answer["token_ids"][: token["place"]], token[kind]]
            made = continuations.get((number, side), [])
            token_ids = [begin] if token[f"{kind}_ends"] else [[*begin, *one.tolist()] for one in made]
            texts = [cut_at_stop(decode(ids), stop) for ids in token_ids]
            scores[side] = scores_of([answer] * len(token_ids), token_ids, texts, scorer)
            if (worst := min(scores[side], default=0.0)) < 0:
                raise InputError(
                    f"the scorer finds an answer of row {token['request_id']} worth {worst:g}: pivots are told by "
                    "shares of what answers are worth, which mean nothing below 0: return numbers of at least 0"
                )
        if all(scores.values()):
            means = {f"utility_{side}": sum(some) / len(some) for side, some in scores.items()}
            counts = {f"rollouts_{side}": len(some) for side, some in scores.items()}
            yield {"number": number, **means, **counts, "pivot": is_pivot(*means.values())}


def write_table(table: pa.Table, file: Path, base: BaseOfClassifier) -> None:
    """Write tokens and the facts of their target model; the file appears as a whole."""
    described = table.replace_schema_metadata({_BASE: json.dumps(asdict(base))})
    with locate(str(file)).open_whole() as stream:
        pa.parquet.write_table(described, stream, compression="zstd")


def read_table(file: Path) -> tuple[pa.Table, BaseOfClassifier]:
    """Read a file of `write_table`; raise `InputError` if it is damaged."""
    try:
        table = pa.parquet.read_table(file)
        return table, BaseOfClassifier(**json.loads(table.schema.metadata[_BASE]))
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({one_line(error)}): delete it and submit the job again") from error


def is_held_out(name: str, share: float) -> bool:
    """Return whether a prompt is held out. Depends on its name alone, so all its tokens are on one side."""
    return zlib.crc32(f"held out {name}".encode()) < share * 2**32


def labelled(tokens: pa.Table, labels: Sequence[Mapping[str, Any]], held_out: float) -> pa.Table:
    """Join tokens, rows of `REJECTION_TYPE` without their long prefixes, with the labels of some of them."""
    table = tokens.take([label["number"] for label in labels]).drop_columns(["prefix", "left"])
    sides = [is_held_out(name, held_out) for name in table["request_id"].to_pylist()]
    rows = [{**label, "held_out": side} for label, side in zip(labels, sides, strict=True)]
    found = pa.Table.from_pylist(rows, _LABEL_TYPE)
    return pa.table({name: part[name] for part in (table, found) for name in part.column_names})


def features_of(labels: pa.Table) -> tuple[PivotFeatures, Tensor]:
    """Return the classifier's features of R labelled tokens, and `[R]` whether they are pivots."""
    # Arrays, not lists: Python's numbers would take eight times the memory.
    hidden = np.concatenate([chunk.flatten().to_numpy() for chunk in labels["hidden"].chunks]).reshape(len(labels), -1)
    entropy, probability, pivots = (
        torch.from_numpy(labels[name].to_numpy().copy()) for name in ("entropy", "probability", "pivot")
    )
    return PivotFeatures(torch.from_numpy(hidden), entropy, probability), pivots

"""The audit: repeats rows of an exact output by plain decoding on a worker, and checks that the tokens are the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.measuring import load_models, measured
from pipeline.generate.row_requests import row_sampling
from pipeline.openai.batch import LINE_FIELDS, parse_line
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder
from pipeline.report.outputs import Row, first_difference, open_output, open_rows, read_run_of, unreadable
from pipeline.settings import SAMPLING_COLUMN, ResourcesConfig

_BATCH_COLUMNS = set(LINE_FIELDS)
"""Columns of rows that come from an OpenAI batch; such requests bring their own settings."""
_READ_COLUMNS = {"request_id", "prompt_token_ids", "token_ids", "seed", PROMPT_IMAGES}


@dataclass(frozen=True)
class RepeatedRow:
    """A request to repeat, and the tokens that the output has for it."""

    request: Request
    token_ids: list[int]


def audit(uri: str, share: float) -> bool:
    """Repeat a share of an output's rows, print the differences, and return whether all have the same tokens.

    Raises `InputError` if the output is not exact, it or its target model cannot be read, and `JobError` on failure.
    """
    output = open_output(uri)
    run = read_run_of(output)
    if not run.get("lossless", True):
        raise InputError(
            f"output {uri} was made by the verifier {run['verifier']}, which is not exact: leave out --sample"
        )
    rows, config = list(rows_to_repeat(output, run, share)), run["config"]
    gpus = config["resources"]["gpus_per_actor"]
    resources = share_out(ResourcesConfig(gpus_per_actor=gpus), connect(), what="audit", settings="the job's {}")
    differences = list(
        measured(
            resources,
            _plain_differences,
            model_name(config["model"]),
            config["loading"],
            config["engine"],
            run.get("base_fingerprint"),
            rows,
            resources.threads,
            mistakes=(LoadError,),
        )
    )
    same = len(rows) - len(differences)
    summary = f"{uri}: {len(rows):,} rows generated again by plain decoding, {same:,} of them with the same tokens"
    print("\n  ".join([summary, *differences]), flush=True)
    return not differences


def rows_to_repeat(output: OutputFolder, run: Mapping[str, Any], share: float) -> Iterator[RepeatedRow]:
    """Draw a share of an output's rows, at least one. Depends on names alone, so each audit draws the same rows.

    Raises `InputError` if the rows cannot be read, or have images: the output has only the digests of these.
    """
    dataset, config = open_rows(output), run["config"]
    try:
        names = dataset.to_table(columns=["request_id"])["request_id"].to_pylist()
        count = math.ceil(share * len(names))
        drawn = nsmallest(count, names, key=lambda name: (zlib.crc32(name.encode()), name))
        rows = dataset.to_table(
            # Only the columns of requests: others may hold values that Python does not have.
            columns=[
                name for name in dataset.schema.names if name in {*_READ_COLUMNS, *_BATCH_COLUMNS, SAMPLING_COLUMN}
            ],
            filter=pc.field("request_id").isin(drawn),
        ).to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(output, error) from error
    defaults = SamplingParams(**config["sampling"])
    if seeing := [row["request_id"] for row in rows if row.get(PROMPT_IMAGES)]:
        raise InputError(
            f"output {output.root.path} has rows with images, such as {seeing[0]}, which no audit can repeat: generate "
            "them again with drafter none into another output, and give both to drafter compare"
        )
    for row in rows:
        request = Request(row["prompt_token_ids"], _sampling(row, defaults), row["request_id"])
        yield RepeatedRow(request, row["token_ids"])


def _sampling(row: Row, defaults: SamplingParams) -> SamplingParams:
    """The settings that a row was generated with. Log-probabilities change no token and are left out."""
    if row.keys() >= _BATCH_COLUMNS:
        settings = parse_line(row).sampling(defaults)
    else:
        settings = row_sampling(defaults, row["request_id"], row, SAMPLING_COLUMN)
    return replace(settings, seed=row["seed"], logprobs=None)


def _plain_differences(
    model: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    fingerprint: str | None,
    rows: Sequence[RepeatedRow],
    threads: int,
) -> Iterator[str]:
    """Generate rows by plain decoding on a worker, and yield a line for each that differs.

    Raises `LoadError` if the target model cannot be loaded, or has another than the output's `fingerprint`.
    """
    base, tokenizer = load_models(model, loading, threads)
    if fingerprint is not None and fingerprint != base.fingerprint:
        raise LoadError(
            f"{model} is not the model that made the output (its weights are {base.fingerprint}, those of the output "
            f"{fingerprint}): have that one where the output's run.json names it"
        )
    config = EngineConfig(**engine, max_queue=len(rows))
    found = decode_all(Engine(base, PlainDecoding(), tokenizer, config), [row.request for row in rows])
    for row, plain in zip(rows, found.generations, strict=True):
        place = first_difference(row.token_ids, plain.token_ids)
        if place is not None:
            logits = _logits(base, [*row.request.prompt_ids, *row.token_ids[:place]])
            said, chosen = (
                _choice(ids[place : place + 1], logits, tokenizer) for ids in (row.token_ids, plain.token_ids)
            )
            where = f"row {row.request.request_id}, token {place}"
            yield f"{where}: the output has {said}, plain decoding {chosen}"


@torch.inference_mode()
def _logits(base: BaseModel, tokens: Sequence[int]) -> Tensor:
    text = torch.tensor(tokens, device=base.device)
    logits, _ = base.prefill_last(base.new_cache(1, len(tokens) + 1), 0, text)
    return logits[0].float().cpu()


def _choice(tokens: Sequence[int], logits: Tensor, tokenizer: Any) -> str:
    if not tokens:
        return "ended"
    return f"{tokens[0]} {tokenizer.decode(tokens)!r} (logit {float(logits[tokens[0]]):.6f})"

"""Labels of rejected draft tokens, and the classifier that learns from them.

Exact answers are decoded once more, and rejected draft tokens recorded; a generation stage of Ray Data continues texts
with and without each of them; the continuations are scored; a classifier learns from the labels.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data
import torch
from torch import Tensor

from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError, RequestError
from drafter.evaluation.decoders import decode_all
from drafter.methods.pad.method import BaseOfClassifier, PivotFeatures, save_classifier
from drafter.requests import Request, SamplingParams, hashed_seed, sample_seed
from drafter.text.text_stream import read_output
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import connect, quiet_ray_data, share_out
from pipeline.command_line import at_least, say
from pipeline.dataset.processor import ProcessorConfig, build_processor
from pipeline.errors import InputError
from pipeline.evaluation.evaluate_job import as_job_errors, load_models, measured, output_folder
from pipeline.generate.row_requests import row_sampling
from pipeline.io.files import locate
from pipeline.openai.batch import LINE_FIELDS, parse_line
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder, versions
from pipeline.report.outputs import Row, open_output, open_rows, read_run_of, rows_of
from pipeline.report.scorers import Scorer, make_scorer
from pipeline.settings import SAMPLING_COLUMN, ResourcesConfig
from recipes.pad.training import RecordingVerifier, Rejection, is_pivot, roc_area, train_classifier

_ROWS_AT_ONCE = 256
_LAYERS_FROM_END = 8  # of the layer that is read, as published
_SIDES = {"with": "rejected", "without": "chosen"}
_SEEDS = 2**31
_REQUEST_COLUMNS = {"request_id", "prompt_token_ids", "token_ids", "seed", PROMPT_IMAGES, SAMPLING_COLUMN, *LINE_FIELDS}
_MISTAKES = (InputError, LoadError, RequestError)

REJECTION_TYPE = pa.schema(
    {
        "request_id": pa.string(),
        "place": pa.int64(),  # position in the row's answer
        "prefix": pa.list_(pa.int32()),  # prompt and answer before it
        "sampling": pa.string(),  # settings of what follows, as JSON
        "rejected": pa.int32(),
        "chosen": pa.int32(),
        "rejected_ends": pa.bool_(),  # the text
        "chosen_ends": pa.bool_(),
        "entropy": pa.float64(),
        "probability": pa.float64(),
        "hidden": pa.list_(pa.float32()),
    }
)


@dataclass(frozen=True)
class PivotsConfig:
    """What the recipe's command line says, whose help explains it.

    Raises:
        InputError: A value is out of its range.
    """

    input: str
    output: str
    scorer: str
    target: str | None = None
    drafter: str | None = None
    tokens_per_prompt: int = 8
    rollouts: int = 20
    temperature: float = 0.7
    held_out: float = 0.25
    engines: int = 1
    cpus: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_per_prompt", "rollouts", "engines"):
            at_least(name, getattr(self, name), 1)
        at_least("temperature", self.temperature, 0, above=True)
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must be between 0 and 1, not {self.held_out:g}")


def pivots(config: PivotsConfig, command: str) -> None:
    """Make the labels and the classifier; `command` is kept for the record.

    Raises `InputError` for a mistake in the configuration or the input, and `JobError` if the job failed on the way.
    """
    scorer, answered = make_scorer(config.scorer, config.target), open_output(config.input)
    run = read_run_of(answered)
    made, drafter = run["config"], config.drafter or run["config"]["drafter"]
    if not run.get("lossless", True):
        raise InputError(f"input {config.input} was made by the verifier {run['verifier']}, which is not exact")
    if drafter == "none":
        raise InputError("drafter none drafts nothing that could be rejected: name another by drafter")
    rows = {row.request.request_id: row for row in rows_to_repeat(answered, run)}
    answers = {row["request_id"]: row for row in rows_of(answered, None)}
    for answer in answers.values():  # before hours of work that a scorer cannot score
        worth(answer, answer["token_ids"], answer["text"], scorer)
    if len({is_held_out(name, config.held_out) for name in rows}) < 2:
        raise InputError(f"{len(rows)} prompts are too few to hold {config.held_out:.0%} of them out: give more")
    folder = output_folder(config.output)

    with as_job_errors(_MISTAKES):
        base, tokens = find_tokens(config, made, drafter, list(rows.values()))
        sampled = continuations(config, made, drafter, tokens)
        tokenizer = load_tokenizer(model_name(made["model"]), trust_remote_code=made["loading"]["trust_remote_code"])
        labels = labelled(tokens, sampled, rows, answers, scorer, tokenizer, config.held_out)
    locate(str(folder / "labels.parquet")).write_parquet(labels)
    out = labels["held_out"]
    kept, others = labels.filter(pc.invert(out)), labels.filter(out)
    if len(kinds := set(kept["pivot"].to_pylist())) < 2:
        what = {frozenset({False}): "none is a pivot", frozenset({True}): "all are pivots"}
        raise InputError(
            f"{len(labels)} labelled tokens teach nothing, as of those that are not held out "
            f"{what.get(frozenset(kinds), 'there are none')}: give more prompts, or ones that the model answers "
            f"rightly more often; the labels are in {folder / 'labels.parquet'}"
        )
    classifier = train_classifier(*features_of(kept))
    area = None
    if len(others):
        features, truth = features_of(others)
        with torch.no_grad():
            area = roc_area(classifier.log_pivot(features), truth)
    counts = {"labels": len(labels), "pivots": pc.sum(labels["pivot"]).as_py(), "held_out": len(others)}
    training = {**counts, "area_under_roc": area, "config": asdict(config), "command": command, "versions": versions()}
    save_classifier(classifier, base, training, folder / "verifier")
    print(f"labels:   {counts['labels']:,} rejected tokens, {counts['pivots']:,} of them pivots")
    known = "not known: they are all alike" if area is None else f"{area:.3f}"
    print(f"ROC:      area {known}, on {len(others):,} tokens of held-out prompts")
    print(f"written:  {folder / 'labels.parquet'}, {folder / 'verifier'}", flush=True)


# Rejected tokens.


@dataclass(frozen=True)
class RepeatedRow:
    """A request to repeat, and the tokens that the output has for it."""

    request: Request
    token_ids: list[int]


def rows_to_repeat(output: OutputFolder, run: Mapping[str, Any]) -> Iterator[RepeatedRow]:
    """Yield an output's rows as requests with the settings that they were generated with.

    Raises `InputError` if the rows cannot be read, or have images: the output has only the digests of these.
    """
    # Only the columns of requests: others may hold values that Python does not have.
    columns = [name for name in open_rows(output).schema.names if name in _REQUEST_COLUMNS]
    defaults = SamplingParams(**run["config"]["sampling"])
    for row in rows_of(output, columns):
        if row.get(PROMPT_IMAGES):
            raise InputError(
                f"output {output.root.path} has rows with images, such as {row['request_id']}, which no job reads again"
            )
        request = Request(row["prompt_token_ids"], _sampling(row, defaults), row["request_id"])
        yield RepeatedRow(request, row["token_ids"])


def _sampling(row: Row, defaults: SamplingParams) -> SamplingParams:
    """The settings that a row was generated with. Log-probabilities change no token and are left out."""
    if row.keys() >= set(LINE_FIELDS):
        settings = parse_line(row).sampling(defaults)
    else:
        settings = row_sampling(defaults, row["request_id"], row, SAMPLING_COLUMN)
    return replace(settings, seed=row["seed"], logprobs=None)


def find_tokens(
    config: PivotsConfig, made: Mapping[str, Any], drafter: str, rows: Sequence[RepeatedRow]
) -> tuple[BaseOfClassifier, pa.Table]:
    """Decode the answers once more on a worker; return the target model and the table of rejected tokens.

    Raises `InputError` if there is nothing to label.
    """
    share = ResourcesConfig(cpus_per_actor=config.cpus)
    resources = share_out(share, connect(), what="searches for rejected tokens")
    asked = (model_name(made["model"]), drafter, made["loading"], made["engine"], rows)
    limits = (config.tokens_per_prompt, resources.threads)
    (base, _), *found = measured(resources, rejected_tokens, *asked, *limits, mistakes=(LoadError, RequestError))
    tokens = pa.concat_tables([table for _, table in found])
    if not len(tokens):
        raise InputError(
            f"no draft token of {drafter} was rejected in {len(rows)} answers: give more prompts, longer answers or "
            "another drafter"
        )
    return base, tokens


def rejected_tokens(
    model: str,
    drafter: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    rows: Sequence[RepeatedRow],
    most: int,
    threads: int,
) -> Iterator[tuple[BaseOfClassifier, pa.Table]]:
    """Yield the target model with the rejected tokens of no rows, then of each batch of rows; of a row at most `most`.

    Raises `LoadError` if a model cannot be loaded.
    """
    base, tokenizer = load_models(model, loading, threads)
    layer = max(base.num_layers - _LAYERS_FROM_END, 0)
    named = BaseOfClassifier(base.name, base.fingerprint, layer)
    yield named, REJECTION_TYPE.empty_table()
    config = EngineConfig(**engine, max_queue=_ROWS_AT_ONCE)
    # Draft even where it does not pay.
    nodes = useful_nodes(base.device) if config.num_draft_tokens == "auto" else config.num_draft_tokens
    recorder = RecordingVerifier(layer)
    proposing = load_drafter(drafter, base, nodes)
    running = Engine(base, proposing, tokenizer, replace(config, num_draft_tokens=nodes), verifier=recorder)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        decode_all(running, [replace(row.request, timeout=None) for row in some])
        found = list(tokens_of(some, recorder.take(), base.eos_token_ids, most))
        yield named, pa.Table.from_pylist(found, schema=REJECTION_TYPE)


def tokens_of(
    rows: Sequence[RepeatedRow], noted: Sequence[Rejection], ends: frozenset[int], most: int
) -> Iterator[Row]:
    """Assign rejections to rows, and draw at most `most` of each row by its name and their positions.

    A rejection is a row's if its text continues as the row does, with the target model's choice after it.
    """
    by_prompt: dict[tuple[int, ...], list[RepeatedRow]] = defaultdict(list)
    keys: dict[tuple[int, ...], set[bytes]] = defaultdict(set)
    for row in rows:
        ids = tuple(row.request.prompt_ids)
        by_prompt[ids].append(row)
        keys[ids].add(row.request.key(np.array(ids)).ids.tobytes())
    # A rejection knows its prompt by the ids alone: it is nobody's where spans of equal ids stand for different things.
    by_prompt = {ids: some for ids, some in by_prompt.items() if len(keys[ids]) == 1}
    found: dict[str, dict[int, tuple[RepeatedRow, Rejection]]] = defaultdict(dict)
    for one in noted:
        prompt, said = one.prefix[: one.prompt_tokens], one.prefix[one.prompt_tokens :]
        for row in by_prompt.get(tuple(prompt), []):
            place = len(said)
            more = row.request.sampling.over().max_new_tokens > place + 1
            if more and row.token_ids[: place + 1] == [*said, one.chosen]:
                found[row.request.request_id][place] = row, one
    for name, places in found.items():
        drawn = sorted((zlib.crc32(f"{name}:{place}".encode()), place) for place in places)[:most]
        yield from (_as_row(*places[place], place, ends) for place in sorted(place for _, place in drawn))


def _as_row(row: RepeatedRow, one: Rejection, place: int, ends: frozenset[int]) -> Row:
    sampling = row.request.sampling.over()
    stops = frozenset() if sampling.ignore_eos else ends
    there = place + 1  # tokens of the answer that are there when it is continued
    changed = {"max_new_tokens": sampling.max_new_tokens - there, "min_tokens": max(sampling.min_tokens - there, 0)}
    return {
        "request_id": row.request.request_id,
        "place": place,
        "prefix": one.prefix,
        "sampling": json.dumps(asdict(sampling) | changed),
        "rejected": one.rejected,
        "chosen": one.chosen,
        "rejected_ends": one.rejected in stops,
        "chosen_ends": one.chosen in stops,
        "entropy": one.entropy,
        "probability": one.probability,
        "hidden": one.hidden.tolist(),
    }


# Continuations.


def continuations(config: PivotsConfig, made: Mapping[str, Any], drafter: str, tokens: pa.Table) -> Iterator[Row]:
    """Continue each token's text with it and with the target model's choice.

    Yields the token's index as `number`, the `side`, the index of the `rollout`, and the new `token_ids`.
    """
    quiet_ray_data()
    engine, loading = made["engine"], made["loading"]
    stage = build_processor(
        ProcessorConfig(
            model_name(made["model"]), drafter, engine, loading=loading, concurrency=config.engines, cpus=config.cpus
        )
    )
    numbered = tokens.drop_columns(["hidden"]).append_column("number", pa.array(range(len(tokens)), pa.int64()))
    say(f"continuing the texts of {len(tokens):,} rejected tokens, {config.rollouts} times with and without each")
    texts = ray.data.from_arrow(numbered).flat_map(
        prompts_of, fn_kwargs={"rollouts": config.rollouts, "temperature": config.temperature}
    )
    found = stage(texts).select_columns(["number", "side", "rollout", "token_ids"])
    for batch in found.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from batch.filter(pc.is_valid(batch["token_ids"])).to_pylist()


def prompts_of(token: Mapping[str, Any], rollouts: int, temperature: float) -> list[Row]:
    """Return the rows to generate for a token. A side that ends the text needs none."""
    settings = json.loads(token["sampling"]) | {"temperature": temperature}
    return [
        {
            "number": int(token["number"]),
            "side": side,
            "rollout": rollout,
            "prompt_token_ids": [*map(int, token["prefix"]), int(token[kind])],
            "sampling_params": json.dumps(
                settings | {"seed": sample_seed(hashed_seed(int(token["number"]), side) % _SEEDS, rollout)}
            ),
        }
        for side, kind in _SIDES.items()
        if not token[f"{kind}_ends"]
        for rollout in range(rollouts)
    ]


# Labels.


def worth(answer: Row, token_ids: list[int], text: str, scorer: Scorer) -> float:
    """Return what a text for an answer's prompt is worth.

    Raises `InputError` if the scorer cannot score it, or says less than 0.
    """
    score = scorer({**answer, "token_ids": token_ids, "text": text})
    if score < 0:
        raise InputError(
            f"the scorer finds an answer of row {answer['request_id']} worth {score:g}: pivots are told by shares of "
            "what answers are worth, which mean nothing below 0: return numbers of at least 0"
        )
    return score


def labelled(
    tokens: pa.Table,
    sampled: Iterator[Row],
    rows: Mapping[str, RepeatedRow],
    answers: Mapping[str, Row],
    scorer: Scorer,
    tokenizer: Any,
    held_out: float,
) -> pa.Table:
    """Score continuations, and return the tokens that have some on both sides, with mean utilities and labels."""
    asked = tokens.drop_columns(["prefix", "sampling", "hidden"]).to_pylist()
    scores: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)

    def score(number: int, side: str, rollout: int, more: list[int]) -> None:
        token, kind = asked[number], _SIDES[side]
        answer, request = answers[token["request_id"]], rows[token["request_id"]].request
        ids = [*answer["token_ids"][: token["place"]], token[kind], *more]
        said = read_output(tokenizer, request.prompt_ids, ids, request.sampling)
        scores[number, side][rollout] = worth(answer, ids, said.text, scorer)

    for number, token in enumerate(asked):
        for side, kind in _SIDES.items():
            if token[f"{kind}_ends"]:
                score(number, side, 0, [])
    for one in sampled:
        score(one["number"], one["side"], one["rollout"], one["token_ids"])
    numbers = [number for number in range(len(asked)) if all((number, side) in scores for side in _SIDES)]
    table = tokens.take(pa.array(numbers, pa.int64())).drop_columns(["prefix", "sampling"])
    means: dict[str, list[float]] = {}
    for side in _SIDES:
        # In the order of the rollouts, not of their arrival: sums of floats depend on it.
        found = [[scores[number, side][rollout] for rollout in sorted(scores[number, side])] for number in numbers]
        means[side] = [sum(some) / len(some) for some in found]
        table = table.append_column(f"utility_{side}", pa.array(means[side], pa.float64()))
        table = table.append_column(f"rollouts_{side}", pa.array(map(len, found), pa.int64()))
    table = table.append_column("pivot", pa.array(map(is_pivot, means["with"], means["without"]), pa.bool_()))
    sides = [is_held_out(name, held_out) for name in table["request_id"].to_pylist()]
    return table.append_column("held_out", pa.array(sides, pa.bool_()))


def is_held_out(name: str, share: float) -> bool:
    """Return whether a prompt is held out. Depends on its name alone, so all its tokens are on one side."""
    return zlib.crc32(f"held out {name}".encode()) < share * 2**32


def features_of(labels: pa.Table) -> tuple[PivotFeatures, Tensor]:
    """Return the classifier's features of R labelled tokens, and `[R]` whether they are pivots."""
    # Arrays, not lists: Python's numbers would take eight times the memory.
    hidden = labels["hidden"].combine_chunks().flatten().to_numpy().reshape(len(labels), -1)
    entropy, probability, pivots = (
        torch.from_numpy(labels[name].to_numpy().copy()) for name in ("entropy", "probability", "pivot")
    )
    return PivotFeatures(torch.from_numpy(hidden.copy()), entropy, probability), pivots

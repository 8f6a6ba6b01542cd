"""The streaming pipeline: staged parts are read, tokenised, generated and committed concurrently."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from typing import Any

import pyarrow as pa
import ray

from drafter.engine.config import EngineConfig
from drafter.engine.sequence import refuse_long
from drafter.errors import PromptTooLongError, RequestError
from drafter.target.loading import load_tokenizer
from drafter.text.bounds import tokenise
from drafter.text.chat import Chat, encode_chats
from drafter.text.streaming import longest_token, refuse_endless
from pipeline.cluster.shares import HELPER_CPUS
from pipeline.engines.engine_actor import EngineActor
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import capacity
from pipeline.engines.models import model_name
from pipeline.engines.shared_texts import OtherTexts
from pipeline.errors import RowError
from pipeline.generate.job_context import JobContext, Work
from pipeline.generate.row_requests import PromptSettings, RowRequest, row_request
from pipeline.io.column_types import whole
from pipeline.output.columns import RunTraits
from pipeline.output.part_files import PartsDatasink
from pipeline.staging.rows import with_problems
from pipeline.staging.samples import SAMPLE_COLUMN
from pipeline.staging.staging import StagedParts, pack, unpack


def to_requests(block: pa.Table, settings: PromptSettings) -> pa.Table:
    return pack((part, make_requests(rows, settings)) for part, rows in unpack(block))


def make_requests(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Replace `asked` of staged rows by `prompt_ids` (list of int32) and `sampling` (`SamplingParams` as JSON).

    Rows without a valid request get a `problem` and nulls instead.
    """
    tokenizer = _tokenizer(settings.tokenizer, settings.trust_remote_code)
    problems = rows["problem"].to_pylist()
    requests: dict[int, RowRequest] = {}
    samples = (
        _samples(rows) if settings.source.kind == "openai" or settings.reading.samples > 1 else [0] * rows.num_rows
    )
    columns = (rows["request_id"].to_pylist(), rows["asked"].to_pylist(), samples)
    for index, (name, asked, sample) in enumerate(zip(*columns, strict=True)):
        if problems[index] is None:
            try:
                request = row_request(name, json.loads(asked), settings, tokenizer, sample)
                text = request.prompt.text if isinstance(request.prompt, Chat) else request.prompt
                if isinstance(text, str):
                    refuse_endless(text, settings.max_length, longest_token(tokenizer))
                requests[index] = request
            except RowError as error:
                problems[index] = vars(error.problem)
            except PromptTooLongError as error:
                problems[index] = vars(RowError("Refused", str(error)).problem)
    ids: dict[int, list[int]] = {}
    for index, found in _tokenise(requests, tokenizer, special_tokens=settings.reading.special_tokens):
        if isinstance(found, RequestError):
            problems[index] = vars(RowError("BadPrompt", str(found)).problem)
            continue
        try:  # their numbers would travel on, only to be refused by an engine
            refuse_long(len(found), settings.max_length)
        except RequestError as error:
            problems[index] = vars(RowError("Refused", str(error)).problem)
        else:
            ids[index] = found
    samplings = {index: json.dumps(dataclasses.asdict(requests[index].sampling)) for index in ids}
    order = range(rows.num_rows)
    rows = with_problems(rows, problems).drop_columns(["asked"])
    rows = rows.append_column("prompt_ids", pa.array([ids.get(index) for index in order], pa.list_(pa.int32())))
    return rows.append_column("sampling", pa.array([samplings.get(index) for index in order], pa.string()))


def _samples(rows: pa.Table) -> list[int]:
    structs = whole(rows["row"])
    samples: list[int] = structs.field(structs.type.get_field_index(SAMPLE_COLUMN)).to_pylist()
    return samples


def _tokenise(
    requests: dict[int, RowRequest], tokenizer: Any, *, special_tokens: bool
) -> Iterator[tuple[int, list[int] | RequestError]]:
    """Yield each prompt's token ids or error. Texts are tokenised together, in parallel."""
    texts: dict[int, str] = {}
    chats: dict[int, Chat] = {}
    for index, request in requests.items():
        match request.prompt:
            case str(text):
                texts[index] = text
            case Chat() as chat:
                chats[index] = chat
            case ids:
                yield index, ids
    yield from zip(texts, _encode_texts(tokenizer, list(texts.values())), strict=True)
    yield from zip(chats, encode_chats(tokenizer, list(chats.values()), special_tokens=special_tokens), strict=True)


def _encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int] | RequestError]:
    if not texts:
        return []
    try:
        return list(tokenise(tokenizer, texts)["input_ids"])
    except RequestError as error:
        return [error] if len(texts) == 1 else [one for text in texts for one in _encode_texts(tokenizer, [text])]


@lru_cache(maxsize=2)
def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


def stream(job: JobContext, work: Work, board: Any, ledger: Any, learner: str | None = None) -> None:
    """Generate and commit the missing parts. A row of the Ray dataset is a part.

    Args:
        learner: Name of the `LearnerActor`, which may start later; None without learning.
    """
    # Large parts first: what is left for the end, when engines run empty, is short.
    parts = sorted(work.missing, key=lambda part: part.nbytes, reverse=True)
    read = ray.data.read_datasource(
        StagedParts(work.staged, parts), override_num_blocks=len(parts), num_cpus=HELPER_CPUS
    )
    requests = read.map_batches(
        to_requests,
        batch_format="pyarrow",
        fn_kwargs={"settings": prompt_settings(job)},
        num_cpus=HELPER_CPUS,
    )
    # Ray replaces an engine's process and gives it its parts again, without end: the ledger knows when to give up.
    generated = requests.map_batches(
        EngineActor,
        batch_size=1,
        batch_format="pyarrow",
        compute=engine_pool(job, work),
        num_cpus=work.resources.cpus,
        num_gpus=work.resources.gpus,
        fn_constructor_kwargs={
            "spec": engine_spec(job, work),
            "limits": job.config.limits,
            "traits": run_traits(job, work.staged.row_type),
            "ledger": ledger,
            "progress": board,
            "run": job.config.output,
            "others": OtherTexts(job.output.data, shared=most_engines(work) > 1),
            "learner": learner,
        },
    )
    generated.write_datasink(PartsDatasink(job.output, ledger.commit.remote), ray_remote_args={"num_cpus": HELPER_CPUS})


def prompt_settings(job: JobContext) -> PromptSettings:
    config, date = job.config, job.meaning["reading"]["date"]
    return PromptSettings(
        model_name(config.model),
        config.loading.trust_remote_code,
        job.prompts,
        config.reading,
        config.sampling,
        config.engine.longest,
        None if date is None else datetime.fromisoformat(date),
    )


def engine_spec(job: JobContext, work: Work) -> EngineSpec:
    config = job.config
    engine = EngineConfig(**asdict(config.engine), max_queue=capacity(config.engine.slots))
    loading, threads = asdict(config.loading), work.resources.threads
    return EngineSpec(
        config.model,
        config.drafter,
        loading,
        engine,
        threads,
        verifier=config.verifier,
        learning=work.beginning,
    )


def run_traits(job: JobContext, row_type: pa.StructType) -> RunTraits:
    has_column = row_type.get_field_index(job.config.reading.sampling_column) >= 0
    rows_have_settings = job.prompts.kind == "openai" or has_column
    config = job.config
    return RunTraits(
        config.sampling, config.writing, rows_have_settings, config.drafter, learning=config.learning.enabled
    )


def most_engines(work: Work) -> int:
    """Return the most engines: one without a part would only hold its node."""
    most = min(work.resources.max_actors or len(work.missing), len(work.missing))
    return max(most, work.resources.min_actors)


def engine_pool(job: JobContext, work: Work) -> ray.data.ActorPoolStrategy:
    """Return the number of engines, and of parts that each has at once."""
    fewest = work.resources.min_actors
    most = most_engines(work)
    # While one part's last rows are decoded, rows of the next ones must fill the other slots.
    calls = 2 + math.ceil(job.config.engine.slots / max(part.rows for part in work.missing))
    return ray.data.ActorPoolStrategy(
        min_size=fewest,
        max_size=most,
        enable_true_multi_threading=True,
        max_concurrent_calls_per_actor=calls,
        # Ray adds actors when more than 1.75 calls wait for each that can run.
        max_tasks_in_flight_per_actor=2 * calls if most > fewest else calls + 1,
    )

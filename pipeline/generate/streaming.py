"""Parts of rows become parts of requests, on CPU workers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import pyarrow as pa
import ray

from drafter.engine.config import EngineConfig
from drafter.engine.sequence import refuse_long
from drafter.errors import RequestError
from drafter.target.loading import load_tokenizer
from drafter.text.chat import Chat, encode_chats
from pipeline.cluster.shares import HELPER_CPUS
from pipeline.engines.engine_actor import EngineActor
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import capacity
from pipeline.engines.models import model_name
from pipeline.engines.shared_texts import OtherTexts
from pipeline.errors import RowError
from pipeline.generate.job_context import JobContext, Work
from pipeline.generate.row_requests import PromptSettings, RowRequest, row_request
from pipeline.output.columns import RunTraits
from pipeline.output.part_files import PartsDatasink
from pipeline.staging.rows import with_problems
from pipeline.staging.staging import StagedParts, pack, unpack

_COMPOSED = 4
"""A tokeniser's normaliser may make one character of several, but hardly ever of more than this."""


def to_requests(block: pa.Table, settings: PromptSettings) -> pa.Table:
    """Make requests of the rows of each part in a block."""
    return pack((part, make_requests(rows, settings)) for part, rows in unpack(block))


def make_requests(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Add `prompt_ids` (list of int32) and `sampling` (`SamplingParams` as JSON) to staged rows.

    Rows that cannot become a request get a `problem` and nulls instead.
    """
    tokenizer = _tokenizer(settings.tokenizer, settings.trust_remote_code)
    problems = rows["problem"].to_pylist()
    requests: dict[int, RowRequest] = {}
    for index, (name, row) in enumerate(zip(rows["request_id"].to_pylist(), rows["row"].to_pylist(), strict=True)):
        if problems[index] is None:
            try:
                request = row_request(name, row, settings, tokenizer)
                refuse_endless(request.prompt, settings.max_length, _longest_token(tokenizer))
                requests[index] = request
            except RowError as error:
                problems[index] = vars(error.problem)
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
    rows = with_problems(rows, problems)
    rows = rows.append_column("prompt_ids", pa.array([ids.get(index) for index in order], pa.list_(pa.int32())))
    return rows.append_column("sampling", pa.array([samplings.get(index) for index in order], pa.string()))


def refuse_endless(prompt: str | Chat | list[int], max_length: int, longest_token: int) -> None:
    """Refuse a text that cannot be short enough, before it is tokenised, which would take minutes and gigabytes.

    Args:
        prompt: A text, a chat, or token ids, which need no tokeniser.
        max_length: Tokens that prompt and output may have together.
        longest_token: Characters of the vocabulary's longest token.

    Raises:
        RowError: The text is too long.
    """
    text = prompt.text if isinstance(prompt, Chat) else prompt
    if isinstance(text, str) and len(text) > max_length * longest_token * _COMPOSED:
        raise RowError(
            "Refused",
            f"the prompt has {len(text)} characters, but prompt and output together may have {max_length} tokens: "
            "shorten the prompt or raise max_length",
        )


@lru_cache(maxsize=2)
def _longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def _tokenise(
    requests: dict[int, RowRequest], tokenizer: Any, *, special_tokens: bool
) -> Iterator[tuple[int, list[int] | RequestError]]:
    """Yield the token ids of each prompt, or why it has none.

    The tokeniser takes many texts at once, which it works on in parallel.
    """
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
    if texts:
        yield from zip(texts, tokenizer(list(texts.values()))["input_ids"], strict=True)
    yield from zip(chats, encode_chats(tokenizer, list(chats.values()), special_tokens=special_tokens), strict=True)


@lru_cache(maxsize=2)
def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    """Load a tokeniser once in each worker process."""
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


# ---- The streaming pipeline: staged parts are read, become requests, are generated and are committed, all at once.


def stream(job: JobContext, work: Work, board: Any, ledger: Any, learner: str | None = None) -> None:
    """Generate and commit the missing parts. A row of the dataset is a part, from its reading to its commit.

    Args:
        job: The job.
        work: What is to be generated.
        board: A `ProgressBoard` actor.
        ledger: A `Ledger` actor.
        learner: Name of the `LearnerActor`, once there is one; None where no head learns.
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
            "traits": run_traits(job, work),
            "ledger": ledger,
            "progress": board,
            "run": job.config.output,
            "others": OtherTexts(job.output.data, shared=most_engines(work) > 1),
            "learner": learner,
        },
    )
    generated.write_datasink(PartsDatasink(job.output, ledger.commit.remote), ray_remote_args={"num_cpus": HELPER_CPUS})


def prompt_settings(job: JobContext) -> PromptSettings:
    """Return how rows of this job become requests."""
    config = job.config
    return PromptSettings(
        model_name(config.model),
        config.loading.trust_remote_code,
        job.prompts,
        config.reading,
        config.sampling,
        config.engine.longest,
    )


def engine_spec(job: JobContext, work: Work) -> EngineSpec:
    """Return what each engine of this job loads."""
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


def run_traits(job: JobContext, work: Work) -> RunTraits:
    """Return what decides which columns the output of this job has."""
    has_column = work.staged.row_type.get_field_index(job.config.reading.sampling_column) >= 0
    rows_have_settings = job.prompts.kind == "openai" or has_column
    return RunTraits(job.config.sampling, job.config.writing, rows_have_settings, learning=job.config.learning.enabled)


def most_engines(work: Work) -> int:
    """Return how many engines there are at most: one without a part would only hold its node."""
    most = min(work.resources.max_actors or len(work.missing), len(work.missing))
    return max(most, work.resources.min_actors)


def engine_pool(job: JobContext, work: Work) -> ray.data.ActorPoolStrategy:
    """Return how many engines there are, and how many parts each of them has at once."""
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

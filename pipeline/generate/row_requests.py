"""Rows become requests: chat template, tokens, and each row's own sampling settings. Runs on CPU workers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from drafter.base.loading import load_tokenizer
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import RequestError
from drafter.requests import SamplingParams
from drafter.text.chat import render_chat
from pipeline.errors import RowError
from pipeline.generate.generate_config import ReadingConfig
from pipeline.generate.samples import SAMPLE_COLUMN, SEEDS, hashed_seed, sample_seed
from pipeline.generate.staged_input import BAD_REQUEST, PROBLEM_TYPE
from pipeline.io.reading import PromptSource
from pipeline.openai.api_error import OpenAIError
from pipeline.openai.batch import parse_line
from pipeline.openai.parsed_request import is_messages

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SEED_COLUMN = "seed"


@dataclass(frozen=True)
class PromptSettings:
    """What it takes to turn a row into a request.

    Args:
        tokenizer: Hub id or folder.
        trust_remote_code: Run code that comes with it.
        source: Where a row's prompt is.
        reading: Whether prompts are chats, and where a row's own settings are.
        sampling: The run's settings; a row's own go before.
    """

    tokenizer: str
    trust_remote_code: bool
    source: PromptSource
    reading: ReadingConfig
    sampling: SamplingParams


def row_seed(run_seed: int, request_id: str) -> int:
    """A row's seed, below 2⁶³: a stable hash of the run's seed and the row's name, whatever the order or batch."""
    return hashed_seed(run_seed, request_id)


def row_sampling(
    defaults: SamplingParams, request_id: str, row: dict[str, Any], column: str, sample: int = 0
) -> SamplingParams:
    """A row's settings: the run's, changed by its `seed` column and then by its own settings in `column`.

    Args:
        defaults: The run's settings.
        request_id: The row's name, which makes its seed where it brings none.
        row: Its columns.
        column: The one with its own settings.
        sample: Which of the row's texts this is.

    Raises:
        RowError: The row's settings are not an object, have an unknown name, or a value that cannot be used.
    """
    own = row.get(column)
    if isinstance(own, str):
        try:
            own = json.loads(own) if own.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("BadSampling", f"column {column!r} is not JSON: {error}") from error
    if own is not None and not isinstance(own, dict):
        raise RowError("BadSampling", f"column {column!r} must be an object of sampling settings, not {own!r}")
    changes = {name: value for name, value in (own or {}).items() if value is not None}
    if unknown := sorted(changes.keys() - _SAMPLING_FIELDS):
        known = ", ".join(sorted(_SAMPLING_FIELDS))
        raise RowError("BadSampling", f"unknown sampling settings {', '.join(unknown)} (there are {known})")
    seed = row.get(_SEED_COLUMN)
    if isinstance(seed, str):  # as in a CSV
        seed = int(seed) if seed.isascii() and seed.isdigit() else seed or None
    own_seed = changes.get("seed", seed)
    changes["seed"] = row_seed(defaults.seed, request_id) if own_seed is None else own_seed
    try:
        sampling = dataclasses.replace(defaults, **changes)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {sampling.seed}")
    return sampling if own_seed is None else dataclasses.replace(sampling, seed=sample_seed(own_seed, sample))


def row_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """A row's chat messages; fields that are null are left out.

    Raises:
        RowError: Not a list of {role, content}, nor such a list as JSON text.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("BadPrompt", f"column {column!r} is not JSON: {error}") from error
    if not value:
        raise RowError("BadPrompt", f"column {column!r} has no messages")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RowError("BadPrompt", f"column {column!r} must be a list of messages with role and content")
    messages = [{name: field for name, field in message.items() if field is not None} for message in value]
    for place, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            raise RowError("BadPrompt", f"message {place} has no role")
        if not isinstance(message.get("content"), str | list):
            raise RowError("BadPrompt", f"message {place} has no content")
    return messages


@dataclass(frozen=True)
class RowRequest:
    """What a row asks for.

    Args:
        prompt: A text to tokenise, or token ids.
        templated: Whether a chat template has written the special tokens.
        sampling: The row's settings.
    """

    prompt: str | list[int]
    templated: bool
    sampling: SamplingParams


def row_request(request_id: str, row: dict[str, Any], settings: PromptSettings, tokenizer: Any) -> RowRequest:
    """What a row asks for, where its columns say it.

    Args:
        request_id: The row's name.
        row: Its columns.
        settings: Where its prompt and its own settings are.
        tokenizer: Has the chat template.

    Raises:
        RowError: No prompt, one that the chat template does not take, or settings that cannot be used.
    """
    reading, source = settings.reading, settings.source
    sample = row[SAMPLE_COLUMN] if reading.samples > 1 else 0
    sampling = row_sampling(settings.sampling, request_id, row, reading.sampling_column, sample)
    value = row.get(source.column)
    if source.kind == "messages":
        return RowRequest(_chat_text(row_messages(value, source.column), tokenizer), True, sampling)
    if not isinstance(value, str) or not value.strip():
        raise RowError("BadPrompt", f"column {source.column!r} is empty")
    if tokenizer.chat_template is None if reading.chat is None else not reading.chat:
        return RowRequest(value, False, sampling)
    return RowRequest(_chat_text([{"role": "user", "content": value}], tokenizer), True, sampling)


def batch_request(request_id: str, line: dict[str, Any], defaults: SamplingParams, tokenizer: Any) -> RowRequest:
    """What a row of an OpenAI batch asks for: one of the choices of its line.

    Args:
        request_id: The row's name.
        line: Its columns, which are the line's.
        defaults: The run's settings, for what the line leaves open.
        tokenizer: Has the chat template.

    Raises:
        RowError: The line cannot be answered.
    """
    try:
        asked = parse_line(line)
        sampling = asked.sampling(defaults)
    except OpenAIError as error:
        raise RowError(BAD_REQUEST, error.message) from error
    sample = line[SAMPLE_COLUMN]
    own_seed = asked.settings.get("seed")
    seed = row_seed(defaults.seed, request_id) if own_seed is None else sample_seed(own_seed, sample)
    prompt = asked.prompts[sample // asked.n]
    sampling = dataclasses.replace(sampling, seed=seed)
    if is_messages(prompt):
        return RowRequest(_chat_text(prompt, tokenizer), True, sampling)
    return RowRequest(prompt, False, sampling)


def _chat_text(messages: list[dict[str, Any]], tokenizer: Any) -> str:
    try:
        return render_chat(tokenizer, messages)
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def make_requests(table: pa.Table, settings: PromptSettings) -> pa.Table:
    """Add `prompt_ids` (list of int32) and `sampling` (`SamplingParams` as JSON) to staged rows.

    Rows that cannot become a request get a `problem` and nulls instead.
    """
    tokenizer = _tokenizer(settings.tokenizer, settings.trust_remote_code)
    problems = table["problem"].to_pylist()
    requests: dict[int, RowRequest] = {}
    named_rows = zip(table["request_id"].to_pylist(), table["row"].to_pylist(), strict=True)
    for index, (request_id, row) in enumerate(named_rows):
        if problems[index] is not None:
            continue
        try:
            if settings.source.kind == "openai":
                requests[index] = batch_request(request_id, row, settings.sampling, tokenizer)
            else:
                requests[index] = row_request(request_id, row, settings, tokenizer)
        except RowError as error:
            problems[index] = vars(error.problem)
    ids = _tokenise(requests, tokenizer)
    samplings = {index: json.dumps(dataclasses.asdict(request.sampling)) for index, request in requests.items()}
    rows = range(table.num_rows)
    table = table.set_column(table.schema.get_field_index("problem"), "problem", pa.array(problems, PROBLEM_TYPE))
    table = table.append_column("prompt_ids", pa.array([ids.get(index) for index in rows], pa.list_(pa.int32())))
    return table.append_column("sampling", pa.array([samplings.get(index) for index in rows], pa.string()))


def _tokenise(requests: dict[int, RowRequest], tokenizer: Any) -> dict[int, list[int]]:
    """Token ids of prompts; many texts at once are tokenised in parallel."""
    ids = {index: request.prompt for index, request in requests.items() if isinstance(request.prompt, list)}
    for templated in (True, False):
        texts = {
            index: request.prompt
            for index, request in requests.items()
            if isinstance(request.prompt, str) and request.templated is templated
        }
        if texts:
            # A chat template writes the special tokens itself.
            encoded = tokenizer(list(texts.values()), add_special_tokens=not templated)["input_ids"]
            ids.update(zip(texts, encoded, strict=True))
    return ids


def model_name(model: str | None) -> str:
    """Hub id or folder of the base that a configuration names; None is the embedded one."""
    return model if model is not None else str(EMBEDDED_BASE)


@lru_cache(maxsize=2)
def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    """One tokeniser a worker process."""
    return load_tokenizer(name, trust_remote_code=trust_remote_code)

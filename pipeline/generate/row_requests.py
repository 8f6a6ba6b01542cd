"""Conversion of rows to requests: prompt, chat template, sampling settings and seed."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from drafter.errors import RequestError, shown
from drafter.requests import SEEDS, SamplingParams, hashed_seed
from drafter.text.chat import Chat, render_chat
from pipeline.errors import RowError
from pipeline.io.prompt_source import PromptSource
from pipeline.openai.batch import parse_line
from pipeline.openai.requests import OpenAIError, is_messages
from pipeline.settings import ReadingConfig
from pipeline.staging.samples import SEED_COLUMN, sample_seed

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EXACT_FLOATS = 2**53
"""Integers below this are exact as floats."""


def row_seed(run_seed: int, request_id: str) -> int:
    """Return a row's seed, below 2⁶³: a stable hash of the run's seed and the row's name alone."""
    return hashed_seed(run_seed, request_id)


def row_sampling(
    defaults: SamplingParams, request_id: str, row: dict[str, Any], column: str, sample: int = 0
) -> SamplingParams:
    """Return a row's settings: the run's, overridden by its `seed` column and then by `column`.

    Args:
        request_id: The row's name, from which the seed follows if the row has none.
        sample: Index of the sample among the row's samples.

    Raises:
        RowError: The row's settings are not an object, have an unknown name, or an invalid value.
    """
    own = _own_settings(row.get(column), column)
    own_seed = own.get("seed", _column_seed(row.get(SEED_COLUMN)))
    own["seed"] = row_seed(defaults.seed, request_id) if own_seed is None else own_seed
    try:
        sampling = dataclasses.replace(defaults, **own)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {shown(sampling.seed)}")
    return sampling if own_seed is None else dataclasses.replace(sampling, seed=sample_seed(own_seed, sample))


def _own_settings(value: Any, column: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("BadSampling", f"column {column!r} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise RowError("BadSampling", f"column {column!r} must be an object of sampling settings, not {shown(value)}")
    own = {name: _plain_setting(setting) for name, setting in (value or {}).items() if setting is not None}
    if unknown := sorted(own.keys() - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        names = ", ".join(shown(name).strip("'") for name in unknown)
        raise RowError("BadSampling", f"unknown sampling settings {names} (there are {known})")
    return own


def _plain_setting(setting: Any) -> Any:
    """Return a table's setting as in JSON, without null entries, which are other rows' keys, and whole floats as
    integers.
    """
    if isinstance(setting, dict):
        return {name: value for name, value in setting.items() if value is not None}
    return _integer_if_whole(setting)


def _integer_if_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS else value


def _column_seed(value: Any) -> Any:
    """Return the seed of a column: text in a CSV, and a float where pandas found missing values."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else value or None
    return _integer_if_whole(value)


@dataclass(frozen=True)
class PromptSettings:
    """Settings of `row_request`.

    Args:
        max_length: Most tokens of prompt and output together that any engine of the run takes.
        now: The time that chat templates see, the same for all rows of an output whenever they are generated.
    """

    tokenizer: str
    trust_remote_code: bool
    source: PromptSource
    reading: ReadingConfig
    sampling: SamplingParams
    max_length: int
    now: datetime | None = None


@dataclass(frozen=True)
class RowRequest:
    """A row's request."""

    prompt: str | Chat | list[int]
    sampling: SamplingParams


def row_request(
    request_id: str, row: dict[str, Any], settings: PromptSettings, tokenizer: Any, sample: int = 0
) -> RowRequest:
    """Return a row's request.

    Args:
        sample: Index of the sample among the row's samples.

    Raises:
        RowError: There is no prompt, the chat template rejects it, or the row's settings are invalid.
    """
    if settings.source.kind == "openai":
        return _batch_request(request_id, row, settings, tokenizer, sample)
    reading, column = settings.reading, settings.source.column
    sampling = row_sampling(settings.sampling, request_id, row, reading.sampling_column, sample)
    value = row.get(column)
    if settings.source.kind == "messages":
        return RowRequest(_chat(row_messages(value, column), tokenizer, settings.now), sampling)
    if not isinstance(value, str) or not value.strip():
        raise RowError("BadPrompt", f"column {column!r} is empty")
    if tokenizer.chat_template is None if reading.chat is None else not reading.chat:
        return RowRequest(value, sampling)
    return RowRequest(_chat([{"role": "user", "content": value}], tokenizer, settings.now), sampling)


def _batch_request(
    request_id: str, line: dict[str, Any], settings: PromptSettings, tokenizer: Any, sample: int
) -> RowRequest:
    defaults = settings.sampling
    try:
        asked = parse_line(line)
        sampling = asked.sampling(defaults)
    except OpenAIError as error:
        raise RowError("BadRequest", error.message) from error
    own_seed = asked.settings.get("seed")
    seed = row_seed(defaults.seed, request_id) if own_seed is None else sample_seed(own_seed, sample)
    sampling = dataclasses.replace(sampling, seed=seed)
    prompt = asked.prompts[sample // asked.n]
    if is_messages(prompt):
        return RowRequest(_chat(prompt, tokenizer, settings.now), sampling)
    return RowRequest(prompt, sampling)


def row_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Read a row's chat messages, without null fields.

    Args:
        value: A list of {role, content}, or that list as JSON text.

    Raises:
        RowError: The value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("BadPrompt", f"column {column!r} is not JSON, but {shown(value)}: {error}") from error
    if value is None or value == []:
        raise RowError("BadPrompt", f"column {column!r} has no messages")
    if not isinstance(value, list):
        raise RowError(
            "BadPrompt", f"column {column!r} must be a list of messages with role and content, not {shown(value)}"
        )
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise RowError(
                "BadPrompt", f"message {number} must be an object with role and content, not {shown(message)}"
            )
    messages = [{name: field for name, field in message.items() if field is not None} for message in value]
    for number, message in enumerate(messages, start=1):
        for name in ("role", "content"):
            if name not in message:
                raise RowError("BadPrompt", f"message {number} has no {name}")
        if not isinstance(role := message["role"], str):
            raise RowError("BadPrompt", f"role of message {number} must be text, not {shown(role)}")
        if not _is_content(content := message["content"]):
            what = "text or a list of typed parts"
            raise RowError("BadPrompt", f"content of message {number} must be {what}, not {shown(content)}")
    return messages


def _is_content(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in value)
    return isinstance(value, str)


def _chat(messages: list[dict[str, Any]], tokenizer: Any, now: datetime | None) -> Chat:
    try:
        return render_chat(tokenizer, messages, now)
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error

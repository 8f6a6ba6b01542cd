"""Rows become requests: chat template, tokens, and each row's own sampling settings. Runs on CPU workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from drafter.base_model import load_tokenizer
from drafter.chat import render_chat
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import RequestError
from drafter.requests import SamplingParams
from pipeline.config import ReadingConfig
from pipeline.errors import RowError
from pipeline.reading import PromptSource
from pipeline.staging import PROBLEM_TYPE

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SEED_COLUMN = "seed"
_SEEDS = 2**63


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
    digest = hashlib.blake2b(f"{run_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEEDS


def row_sampling(defaults: SamplingParams, request_id: str, row: dict[str, Any], column: str) -> SamplingParams:
    """A row's settings: the run's, changed by its `seed` column and then by its own settings in `column`.

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
    changes.setdefault("seed", row_seed(defaults.seed, request_id) if seed is None else seed)
    try:
        sampling = dataclasses.replace(defaults, **changes)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= _SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {sampling.seed}")
    return sampling


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


def row_text(row: dict[str, Any], source: PromptSource, chat: bool, tokenizer: Any) -> str:
    """The text to tokenise for a row.

    Args:
        row: Its columns.
        source: Where the prompt is.
        chat: Whether text prompts go through the chat template.
        tokenizer: Has the chat template.

    Raises:
        RowError: No prompt, or one that the chat template does not take.
    """
    value = row.get(source.column)
    if source.chat:
        messages = row_messages(value, source.column)
    else:
        if not isinstance(value, str) or not value.strip():
            raise RowError("BadPrompt", f"column {source.column!r} is empty")
        if not chat:
            return value
        messages = [{"role": "user", "content": value}]
    try:
        return render_chat(tokenizer, messages)
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def make_requests(table: pa.Table, settings: PromptSettings) -> pa.Table:
    """Add `prompt_ids` (list of int32) and `sampling` (`SamplingParams` as JSON) to staged rows.

    Rows that cannot become a request get a `problem` and nulls instead.
    """
    tokenizer = _tokenizer(settings.tokenizer, settings.trust_remote_code)
    reading, source = settings.reading, settings.source
    templated = source.chat or (tokenizer.chat_template is not None if reading.chat is None else reading.chat)
    problems = table["problem"].to_pylist()
    texts: dict[int, str] = {}
    samplings: list[str | None] = [None] * table.num_rows
    named_rows = zip(table["request_id"].to_pylist(), table["row"].to_pylist(), strict=True)
    for index, (request_id, row) in enumerate(named_rows):
        if problems[index] is not None:
            continue
        try:
            sampling = row_sampling(settings.sampling, request_id, row, reading.sampling_column)
            texts[index] = row_text(row, source, templated, tokenizer)
            samplings[index] = json.dumps(dataclasses.asdict(sampling))
        except RowError as error:
            problems[index] = vars(error.problem)
    ids: list[list[int] | None] = [None] * table.num_rows
    if texts:
        # A chat template writes the special tokens itself.
        encoded = tokenizer(list(texts.values()), add_special_tokens=not templated)["input_ids"]
        for index, tokens in zip(texts, encoded, strict=True):
            ids[index] = tokens
    table = table.set_column(table.schema.get_field_index("problem"), "problem", pa.array(problems, PROBLEM_TYPE))
    table = table.append_column("prompt_ids", pa.array(ids, pa.list_(pa.int32())))
    return table.append_column("sampling", pa.array(samplings, pa.string()))


def model_name(model: str | None) -> str:
    """Hub id or folder of the base that a configuration names; None is the embedded one."""
    return model if model is not None else str(EMBEDDED_BASE)


@lru_cache(maxsize=2)
def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    """One tokeniser a worker process."""
    return load_tokenizer(name, trust_remote_code=trust_remote_code)

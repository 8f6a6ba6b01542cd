"""Rows become requests: prompt, chat template, tokens, sampling settings and seed.

A worker does it, which imports no model code: that takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import pyarrow as pa

from drafter.errors import PromptTooLongError, RequestError, shown, unknown_setting
from drafter.requests import SEEDS, SamplingParams, hashed_seed, sample_seed
from drafter.text.chat import Chat, encode_chats, render_chat
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import load_tokenizer, longest_token, refuse_endless, refuse_long, tokenise
from pipeline.errors import RowError, RowProblem
from pipeline.generate.staging import SAMPLE_COLUMN, SEED_COLUMN
from pipeline.io.column_types import whole
from pipeline.io.listing import PromptSource
from pipeline.io.parts import pack, unpack, with_problems
from pipeline.openai.batch import parse_line
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import Prompt
from pipeline.settings import SAMPLING_COLUMN, TEMPLATE_COLUMNS, ReadingConfig

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EXACT_FLOATS = 2**53  # integers below are exact as floats


def row_sampling(
    defaults: SamplingParams, seed_name: str, row: dict[str, Any], column: str, sample: int = 0
) -> SamplingParams:
    """Return a row's settings: the run's, overridden by its `seed` column and then by `column`.

    Args:
        seed_name: What the seed follows from if the row has none.
        sample: Index of the sample among the row's samples.

    Raises:
        RowError: The row's settings are not an object, have an unknown name, or an invalid value.
    """
    own = _own_settings(row.get(column), column)
    own_seed = own.get("seed", _column_seed(row.get(SEED_COLUMN)))
    own["seed"] = hashed_seed(defaults.seed, seed_name) if own_seed is None else own_seed
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
    if problem := unknown_setting(sorted(own), SamplingParams):
        raise RowError("BadSampling", f"column {column!r}: {problem}")
    return own


def _plain_setting(setting: Any) -> Any:
    # As in JSON: a table has null entries, which are other rows' keys, and whole floats for integers.
    if isinstance(setting, dict):
        return {name: value for name, value in setting.items() if value is not None}
    return _integer_if_whole(setting)


def _integer_if_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS else value


def _column_seed(value: Any) -> Any:
    # It is text in a CSV, and a float where pandas found missing values.
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else value or None
    return _integer_if_whole(value)


@dataclass(frozen=True)
class PromptSettings:
    """Settings of `to_requests`.

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


def _row_request(
    seed_name: str, row: dict[str, Any], settings: PromptSettings, tokenizer: Any, sample: int
) -> tuple[str | list[int] | Chat, SamplingParams]:
    prompt: Prompt
    if settings.source.kind == "openai":
        prompt, sampling = _batch_request(seed_name, row, settings.sampling, tokenizer, sample)
    else:
        sampling = row_sampling(settings.sampling, seed_name, row, SAMPLING_COLUMN, sample)
        prompt = _prompt_of(row, settings, tokenizer)
    if not isinstance(prompt, Conversation):
        return prompt, sampling
    every = settings.reading.chat_template_kwargs or {}
    try:
        asked = dataclasses.replace(prompt, chat_template_kwargs={**every, **(prompt.chat_template_kwargs or {})})
        return render_chat(tokenizer, asked, settings.now), sampling
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def _prompt_of(row: dict[str, Any], settings: PromptSettings, tokenizer: Any) -> Prompt:
    chat, column = settings.reading.chat, settings.source.column
    value = row.get(column)
    if settings.source.kind == "messages":
        return row_conversation(row, column)
    if not isinstance(value, str) or not value.strip():
        raise RowError("BadPrompt", f"column {column!r} is empty")
    through_template = tokenizer.chat_template is not None if chat is None else chat
    return Conversation([{"role": "user", "content": value}]) if through_template else value


def _batch_request(
    seed_name: str, line: dict[str, Any], defaults: SamplingParams, tokenizer: Any, sample: int
) -> tuple[Prompt, SamplingParams]:
    try:
        asked = parse_line(line).for_model(tokenizer)
        sampling = asked.sampling(defaults)
    except OpenAIError as error:
        raise RowError("BadRequest", error.message) from error
    own_seed = asked.settings.get("seed")
    seed = hashed_seed(defaults.seed, seed_name) if own_seed is None else sample_seed(own_seed, sample)
    return asked.prompts[sample // asked.n], dataclasses.replace(sampling, seed=seed)


def row_conversation(row: Mapping[str, Any], column: str) -> Conversation:
    """Return what a row asks of the chat template; `RowError` if it cannot be read.

    Its messages, and the columns beside them, are lists and objects, or JSON texts of these.
    """
    messages = _from_json(row.get(column), column)
    if messages is None or messages == []:
        raise RowError("BadPrompt", f"column {column!r} has no messages")
    if not isinstance(messages, list):
        raise RowError(
            "BadPrompt", f"column {column!r} must be a list of messages with role and content, not {shown(messages)}"
        )
    try:
        return Conversation(messages, **{name: _from_json(row.get(name), name) for name in TEMPLATE_COLUMNS})
    except RequestError as error:
        raise RowError("BadPrompt", str(error)) from error


def _from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowError("BadPrompt", f"column {column!r} is not JSON, but {shown(value)}: {error}") from error


# Tokens.


def to_requests(block: pa.Table, settings: PromptSettings) -> pa.Table:
    return pack((part, make_requests(rows, settings)) for part, rows in unpack(block))


def make_requests(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Replace `seed_name` and `asked` of staged rows by `prompt_ids` (list of int32) and `sampling` (`SamplingParams`).

    The latter are JSON. Rows without a valid request get a `problem` and nulls instead.
    """
    tokenizer = _tokenizer(settings.tokenizer, settings.trust_remote_code)
    problems = rows["problem"].to_pylist()
    prompts: dict[int, str | list[int] | Chat] = {}
    samplings: dict[int, str] = {}
    samples = [0] * rows.num_rows
    if settings.source.kind == "openai" or settings.reading.samples > 1:
        structs = whole(rows["row"])
        samples = structs.field(structs.type.get_field_index(SAMPLE_COLUMN)).to_pylist()
    columns = (rows["seed_name"].to_pylist(), rows["asked"].to_pylist(), samples)
    for index, (name, asked, sample) in enumerate(zip(*columns, strict=True)):
        if problems[index] is not None:
            continue
        try:
            prompt, sampling = _row_request(name, json.loads(asked), settings, tokenizer, sample)
            text = prompt.text if isinstance(prompt, Chat) else prompt
            if isinstance(text, str):
                refuse_endless(text, settings.max_length, longest_token(tokenizer))
        except RowError as error:
            problems[index] = vars(error.problem)
        except PromptTooLongError as error:
            problems[index] = vars(RowProblem("Refused", str(error)))
        else:
            prompts[index], samplings[index] = prompt, json.dumps(dataclasses.asdict(sampling))
    ids: dict[int, list[int]] = {}
    for index, found in _tokenise(prompts, tokenizer, special_tokens=settings.reading.special_tokens):
        try:  # the numbers of a long prompt would travel on, only to be refused by an engine
            if isinstance(found, RequestError):
                raise RowError("BadPrompt", str(found))
            refuse_long(len(found), settings.max_length)
        except RowError as error:
            problems[index] = vars(error.problem)
        except RequestError as error:
            problems[index] = vars(RowProblem("Refused", str(error)))
        else:
            ids[index] = found
    numbers = range(len(problems))
    rows = with_problems(rows, problems).drop_columns(["seed_name", "asked"])
    rows = rows.append_column("prompt_ids", pa.array(map(ids.get, numbers), pa.list_(pa.int32())))
    texts = [samplings[index] if index in ids else None for index in numbers]
    return rows.append_column("sampling", pa.array(texts, pa.string()))


def _tokenise(
    prompts: dict[int, str | list[int] | Chat], tokenizer: Any, *, special_tokens: bool
) -> Iterator[tuple[int, list[int] | RequestError]]:
    # Texts are tokenised together, in parallel.
    texts = {index: prompt for index, prompt in prompts.items() if isinstance(prompt, str)}
    chats = {index: prompt for index, prompt in prompts.items() if isinstance(prompt, Chat)}
    yield from ((index, prompt) for index, prompt in prompts.items() if isinstance(prompt, list))
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

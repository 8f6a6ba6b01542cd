"""Rows become requests: a worker renders and tokenises their prompts. It imports no model code, which takes seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa

from drafter.errors import PromptTooLongError, RequestError
from drafter.text.chat import Chat, encode_chats
from drafter.text.tokenizers import load_tokenizer, longest_token, refuse_endless, refuse_long, tokenise
from pipeline.errors import RowError
from pipeline.generate.row_requests import PromptSettings, RowRequest, row_request
from pipeline.io.column_types import whole
from pipeline.staging.rows import with_problems
from pipeline.staging.samples import SAMPLE_COLUMN
from pipeline.staging.staging import pack, unpack


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

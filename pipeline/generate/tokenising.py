"""Parts of rows become parts of requests, on CPU workers."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

import pyarrow as pa

from drafter.base.loading import load_tokenizer
from drafter.engine.sequences.intake import refuse_long
from drafter.errors import RequestError
from pipeline.errors import RowError
from pipeline.generate.row_requests import PromptSettings, RowRequest, row_request
from pipeline.staging.part_rows import pack, unpack
from pipeline.staging.row_problems import with_problems

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
    ids = _tokenise(requests, tokenizer)
    for index in list(ids):
        try:  # their numbers would travel on, only to be refused by an engine
            refuse_long(len(ids[index]), settings.max_length)
        except RequestError as error:
            problems[index] = vars(RowError("Refused", str(error)).problem)
            del ids[index], requests[index]
    samplings = {index: json.dumps(dataclasses.asdict(request.sampling)) for index, request in requests.items()}
    order = range(rows.num_rows)
    rows = with_problems(rows, problems)
    rows = rows.append_column("prompt_ids", pa.array([ids.get(index) for index in order], pa.list_(pa.int32())))
    return rows.append_column("sampling", pa.array([samplings.get(index) for index in order], pa.string()))


def refuse_endless(prompt: str | list[int], max_length: int, longest_token: int) -> None:
    """Refuse a text that cannot be short enough, before it is tokenised, which would take minutes and gigabytes.

    Args:
        prompt: A text, or token ids, which need no tokeniser.
        max_length: Tokens that prompt and output may have together.
        longest_token: Characters of the vocabulary's longest token.

    Raises:
        RowError: The text is too long.
    """
    if isinstance(prompt, str) and len(prompt) > max_length * longest_token * _COMPOSED:
        raise RowError(
            "Refused",
            f"the prompt has {len(prompt)} characters, but prompt and output together may have {max_length} tokens: "
            "shorten the prompt or raise max_length",
        )


@lru_cache(maxsize=2)
def _longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def _tokenise(requests: dict[int, RowRequest], tokenizer: Any) -> dict[int, list[int]]:
    """Return the token ids of prompts; the tokeniser takes many texts at once, which it works on in parallel."""
    ids = {index: request.prompt for index, request in requests.items() if isinstance(request.prompt, list)}
    for templated in (True, False):
        texts = {
            index: request.prompt
            for index, request in requests.items()
            if isinstance(request.prompt, str) and request.templated is templated
        }
        if texts:
            # A chat template has written the special tokens itself.
            encoded = tokenizer(list(texts.values()), add_special_tokens=not templated)["input_ids"]
            ids.update(zip(texts, encoded, strict=True))
    return ids


@lru_cache(maxsize=2)
def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    """Load a tokeniser once in each worker process."""
    return load_tokenizer(name, trust_remote_code=trust_remote_code)

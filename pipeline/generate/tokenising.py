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
                requests[index] = row_request(name, row, settings, tokenizer)
            except RowError as error:
                problems[index] = vars(error.problem)
    ids = _tokenise(requests, tokenizer)
    for index in list(ids):
        try:  # a row of megabytes would travel on as millions of numbers, only to be refused by an engine
            refuse_long(len(ids[index]), settings.max_length)
        except RequestError as error:
            problems[index] = vars(RowError("Refused", str(error)).problem)
            del ids[index], requests[index]
    samplings = {index: json.dumps(dataclasses.asdict(request.sampling)) for index, request in requests.items()}
    order = range(rows.num_rows)
    rows = with_problems(rows, problems)
    rows = rows.append_column("prompt_ids", pa.array([ids.get(index) for index in order], pa.list_(pa.int32())))
    return rows.append_column("sampling", pa.array([samplings.get(index) for index in order], pa.string()))


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

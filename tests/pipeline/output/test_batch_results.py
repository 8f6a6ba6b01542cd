"""What OpenAI's clients are told of a request that failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter.errors import PromptTooLongError, RequestError
from drafter.requests import SamplingParams
from drafter.text.tokenizers import load_tokenizer, refuse_endless, refuse_long
from pipeline.io.files import locate
from pipeline.openai.answers import token_text
from pipeline.openai.batch import parse_line
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import refuse_images, refused
from pipeline.output.batch_results import BatchRun, write_batch
from pipeline.output.folder import OutputFolder

BODY = {"model": "gpt", "messages": [{"role": "user", "content": "x"}]}
MADE: dict[str, Any] = {
    "text": "hello",
    "prompt_token_ids": [1],
    "token_ids": [2, 3],
    "finish_reason": "stop",
    "num_prompt_tokens": 1,
    "num_cached_tokens": 0,
    "num_output_tokens": 2,
    "num_draft_tokens": 0,
    "num_accepted_draft_tokens": 0,
    "logprobs": None,
}
"""What a job has made of a row."""
DEFAULTS = SamplingParams(max_new_tokens=9)


def line(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    text = json.dumps(BODY | body)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": text}


def written(
    folder: Path, finished: list[Any], errors: list[Any], model: str = "no model", **run: Any
) -> dict[str, list[Any]]:
    """Return the lines of the files of a batch with these rows, by the files' names."""
    for name, rows in (("data", finished), ("errors", errors)):
        (folder / name).mkdir()
        if rows:
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / name / "part.parquet")
    names = sorted(row["request_id"] for row in [*finished, *errors])
    staged: Any = SimpleNamespace(created=1, request_ids=lambda: iter(names))
    write_batch(OutputFolder(locate(str(folder))), staged, BatchRun(MADE, DEFAULTS, model, **run))
    files = sorted(folder.glob("*.jsonl"))
    return {file.name: [json.loads(text) for text in file.read_text().splitlines()] for file in files}


def test_keys_of_a_line_that_are_no_request_change_no_answer(tmp_path: Path) -> None:
    """Whether a row has failed does not depend on the names of its input's columns, nor does what it says."""
    more = {"error_type": "x", "message": "y", "lossless": False, "verifier": 3, "reasoning_content": [1]}
    rows = [{"request_id": f"{name}#0", **line(name), **MADE, **more} for name in "ab"]
    error = {"request_id": "c#0", "input": "{}", "error_type": "BadRow", "message": "why", "attempts": 0}
    files = written(tmp_path, rows, [error])
    assert [len(lines) for lines in files.values()] == [1, 2]
    for one, name in zip(files["batch_output.jsonl"], "ab", strict=True):
        answer = one["response"]["body"]
        assert (one["custom_id"], answer["choices"][0]["message"]["content"]) == (name, "hello")
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert "lossless" not in answer


def test_tokens_are_told_of_a_model_in_a_bucket(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cluster.model_copies._COPIES", tmp_path / "copies")
    logprobs = [{"token_id": 5, "logprob": -1.0, "top": []}]
    row = {"request_id": "a#0", **line(logprobs=True), **MADE, "logprobs": logprobs}
    (tmp_path / "out").mkdir()
    [told] = written(tmp_path / "out", [row], [], f"file://{model}")["batch_output.jsonl"]
    [token] = told["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert token["token"] == token_text(load_tokenizer(model), 5)


@pytest.mark.parametrize(
    ("error_type", "status", "code"),
    [
        ("Refused", 400, "invalid_value"),
        ("BadPrompt", 400, "invalid_value"),
        ("NotFinite", 500, "not_finite"),
        ("TimedOut", None, "request_timeout"),
        ("EngineDied", None, "server_error"),
    ],
)
def test_whose_fault_it_was(tmp_path: Path, error_type: str, status: int | None, code: str | None) -> None:
    """A model that overflows is no mistake of the request."""
    row = {"request_id": "a#0", "input": json.dumps(line()), "error_type": error_type, "message": "why", "attempts": 1}
    [told] = written(tmp_path, [], [row])["batch_errors.jsonl"]
    assert told["custom_id"] == "a"
    if status is None:
        assert (told["response"], told["error"]["code"]) == (None, code)
    else:
        assert told["error"] is None
        assert told["response"]["status_code"] == status
        assert told["response"]["body"]["error"]["code"] == code


def failed(folder: Path, asked: Any, kind: str, message: str, **run: Any) -> dict[str, Any]:
    """Return the line for a request that a job has not answered."""
    row = {"request_id": "a#0", "input": json.dumps(asked), "error_type": kind, "message": message, "attempts": 0}
    [told] = written(folder, [], [row], **run)["batch_errors.jsonl"]
    return dict(told)


@pytest.mark.parametrize("refuse", [lambda: refuse_long(99, 50), lambda: refuse_endless("a" * 999, 2, 1)])
def test_a_prompt_that_is_too_long_is_the_endpoints_error(tmp_path: Path, refuse: Callable[[], None]) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        refuse()
    told = failed(tmp_path, line(), "Refused", str(caught.value))["response"]
    assert (told["status_code"], told["body"]) == (400, refused(caught.value, None).body())
    assert told["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_tokens": 10}, "min_tokens"),  # more than the run's limit
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"n": 1000}, "n"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_a_setting_that_is_refused_is_named(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    asked, kind = line(**body), "BadRequest"
    try:
        parse_line(asked).sampling(DEFAULTS)
        kind, message = "Refused", "structured_outputs.regex: it is no regular expression"
        error = refused(RequestError(message), parse_line(asked))
    except OpenAIError as found:
        error, message = found, found.message
    told = failed(tmp_path, asked, kind, message)["response"]
    assert (told["status_code"], told["body"]) == (400, error.body())
    assert (error.param, error.code) == (param, "invalid_value")


def test_a_number_may_name_a_line_of_a_table(tmp_path: Path) -> None:
    told = failed(tmp_path, line(5, temperature=9), "BadRequest", "Invalid 'temperature'")
    assert (told["custom_id"], told["response"]["body"]["error"]["param"]) == (5, "temperature")


@pytest.mark.parametrize(("most", "code"), [(None, "invalid_value"), (1, "array_above_max_length")])
def test_images_that_are_refused_are_the_endpoints_error(tmp_path: Path, most: int | None, code: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = line(messages=[{"role": "user", "content": [part, part]}])
    with pytest.raises(OpenAIError) as caught:
        refuse_images(2, most)
    told = failed(tmp_path, asked, "BadPrompt", "there are 2 images, and up to 1 are read", images=most)["response"]
    assert told["body"] == caught.value.body()
    assert (told["body"]["error"]["param"], told["body"]["error"]["code"]) == ("messages", code)

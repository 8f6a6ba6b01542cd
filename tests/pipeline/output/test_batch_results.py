"""What OpenAI's clients are told of a request that failed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter.text.tokenizers import load_tokenizer
from pipeline.io.files import locate
from pipeline.openai.answers import token_text
from pipeline.output.batch_results import write_batch
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


def line(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    text = json.dumps(BODY | body)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": text}


def written(folder: Path, finished: list[Any], errors: list[Any], model: str = "no model") -> dict[str, list[Any]]:
    """Return the lines of the files of a batch with these rows, by the files' names."""
    for name, rows in (("data", finished), ("errors", errors)):
        (folder / name).mkdir()
        if rows:
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / name / "part.parquet")
    names = sorted(row["request_id"] for row in [*finished, *errors])
    staged: Any = SimpleNamespace(created=1, request_ids=lambda: iter(names))
    write_batch(OutputFolder(locate(str(folder))), staged, MADE, model)
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
        ("Refused", 400, None),
        ("BadPrompt", 400, None),
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

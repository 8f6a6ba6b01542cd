"""What OpenAI's clients are told of a request that failed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.io.files import locate
from pipeline.output.batch_results import write_batch
from pipeline.output.folder import OutputFolder

BODY = {"model": "gpt", "messages": [{"role": "user", "content": "x"}]}


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
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(BODY)}
    row = {"request_id": "a#0", "input": json.dumps(line), "error_type": error_type, "message": "why", "attempts": 1}
    for name in ("data", "errors"):
        (tmp_path / name).mkdir()
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "errors" / "part.parquet")
    staged: Any = SimpleNamespace(created=1, request_ids=lambda: iter(["a#0"]))
    write_batch(OutputFolder(locate(str(tmp_path))), staged, "no model")
    [told] = [json.loads(text) for text in (tmp_path / "batch_errors.jsonl").read_text().splitlines()]
    assert told["custom_id"] == "a"
    if status is None:
        assert (told["response"], told["error"]["code"]) == (None, code)
    else:
        assert told["error"] is None
        assert told["response"]["status_code"] == status
        assert told["response"]["body"]["error"]["code"] == code

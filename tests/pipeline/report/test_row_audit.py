from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter.requests import SamplingParams
from jobs.compare import main
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig
from pipeline.report.audit import rows_to_repeat
from pipeline.report.config import share_of
from tests.pipeline.conftest import FinishedJob
from tests.pipeline.report.outputs import write_output


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.01", 0.01), (" 2.5 % ", 0.025), ("100%", 1.0)])
def test_a_share_of_the_rows(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0%", "101%", "-1%", "some", "nan", "2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--sample must be a share of the rows such as 1% or 0\.01, not"):
        share_of(text)


def run_of(**sampling: Any) -> dict[str, Any]:
    return {"config": GenerateConfig("in", "out", sampling=SamplingParams(**sampling)).as_dict()}


def test_each_audit_draws_the_same_rows_and_at_least_one(tmp_path: Path) -> None:
    rows = [{"id": f"row {n}", "accepted": [0], "token_ids": [n], "marks": {"seed": n}} for n in range(40)]
    drawn = []
    for name, parts in (("a", [rows]), ("b", [rows[20:], rows[:20]])):
        output = write_output(tmp_path / name, parts, [])
        found = {row.request.request_id: row for row in rows_to_repeat(output, run_of(), 0.1)}
        assert len(found) == 4
        assert all(row.token_ids == [row.request.sampling.seed] for row in found.values())
        drawn.append(set(found))
        assert len(list(rows_to_repeat(output, run_of(), 0.0001))) == 1
    assert drawn[0] == drawn[1]


def test_a_row_is_generated_with_its_own_settings(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "temperature": 0.5, "max_tokens": 9})
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    own = {"sampling": '{"temperature": 0.9, "logprobs": 3}'}
    for number, (columns, temperature, most) in enumerate(((line, 0.5, 9), (own, 0.9, 7), ({}, 0.2, 7))):
        row = {"id": "a", "accepted": [0], "marks": {"seed": 11, **columns}}
        output = write_output(tmp_path / str(number), [[row]], [])
        (found,) = rows_to_repeat(output, run_of(temperature=0.2, max_new_tokens=7, logprobs=1), 1.0)
        asked = found.request.sampling
        assert (asked.temperature, asked.max_new_tokens, asked.seed, asked.logprobs) == (temperature, most, 11, None)
        assert list(found.request.prompt_ids) == [20, 21]


def test_a_planted_token_is_found_and_shown_with_both_logits(
    finished: FinishedJob, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = finished.outcome.folder
    assert main([str(folder), "--sample", "100%"]) == 0
    assert "7 rows generated again by plain decoding, 7 of them with the same tokens" in capfd.readouterr().out
    file = sorted((folder / "data").iterdir())[0]
    table = pyarrow.parquet.read_table(file)
    rows = table.to_pylist()
    right, name = rows[0]["token_ids"][3], rows[0]["request_id"]
    rows[0]["token_ids"][3] = wrong = (right + 1) % 320
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    assert main([str(folder), "--sample", "1"]) == 1
    out = capfd.readouterr().out
    assert "7 rows generated again by plain decoding, 6 of them with the same tokens" in out
    shown = re.search(
        rf"row {re.escape(name)}, token 3: the output has {wrong} '.*' \(logit (\S+)\), "
        rf"plain decoding {right} '.*' \(logit (\S+)\)",
        out,
    )
    assert shown is not None, out
    assert shown[1] != shown[2]


def test_what_cannot_be_audited_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    output = write_output(folder, [[{"id": "a", "accepted": [0]}]], [])
    output.run_file.write_text(json.dumps({"meaning": {}, "state": "finished", "lossless": False, "verifier": "fly"}))
    for arguments, message in (
        ([], "there is one output: give another to compare it with, or --sample to audit it"),
        (["--sample", "2%", "--scorer", "number"], "an audit of one output has no scorer and no page"),
        (["--sample", "2%"], f"output {folder} was made by the verifier fly, which is not exact: leave out --sample"),
    ):
        assert main([str(folder), *arguments]) == 2
        assert message in capsys.readouterr().err

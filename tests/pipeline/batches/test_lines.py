"""Lines are checked as OpenAI checks them, and each result is kept once, whenever writing ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.batches.lines import Result, Results, check_lines
from pipeline.batches.records import Problem

CHAT = "/v1/chat/completions"


def line(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"custom_id": f"row {number}", "method": "POST", "url": CHAT, "body": {"number": number}} | changes


def written(file: Path, *lines: Any) -> Path:
    file.write_bytes(b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines))
    return file


def test_lines_are_read_by_their_numbers(tmp_path: Path) -> None:
    file = written(tmp_path / "input", line(0), b"", line(1, custom_id="ä"), b"  ", line(2))
    file.write_bytes(file.read_bytes()[:-1])  # the last one has no end
    requests, problems = check_lines(file, CHAT, 3)
    assert (len(requests), problems) == (3, [])
    found = [requests.read(number) for number in (2, 0, 1)]
    assert [one.custom_id for one in found] == ["row 2", "row 0", "ä"]
    assert json.loads(found[0].body) == {"number": 2}


def test_a_body_is_what_the_client_wrote(tmp_path: Path) -> None:
    body = '{"body" : [1.0, 1e2, "\\u00e4}"],"custom_id":{ } }'
    text = (
        f' {{ "body":1, "custom_id" :"\\u00e4,{{", "method":"POST","url":"{CHAT}", "more":[{{}}] ,"body"\t:{body}}} \r'
    )
    requests, problems = check_lines(written(tmp_path / "input", text.encode(), line(1)), CHAT, 3)
    found = requests.read(0)
    assert (problems, found.custom_id, found.body.decode()) == ([], "ä,{", body)


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"no json", "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (b'{"custom_id": 1e999}', "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        ([1], "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(custom_id=5), "invalid_request", "custom_id"),
        (line(custom_id=""), "invalid_request", "custom_id"),
        (line(method="GET"), "invalid_request", "method"),
        (line(body="{}"), "invalid_request", "body"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(url="/v1/completions"), "url_mismatch", "url"),
        (line(url=None), "url_mismatch", "url"),
        (line(7), "duplicate_custom_id", "custom_id"),
    ],
    ids=str,
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, bad: Any, code: str, param: str | None) -> None:
    _, problems = check_lines(written(tmp_path / "input", line(7), b"", bad, line(8)), CHAT, 9)
    assert [(one.code, one.param, one.line) for one in problems] == [(code, param, 3)]
    assert problems[0].message.endswith(".")


def test_a_file_has_some_requests_and_not_too_many(tmp_path: Path) -> None:
    _, problems = check_lines(written(tmp_path / "input", b"", b" "), CHAT, 9)
    assert [one.code for one in problems] == ["empty_file"]
    lines = [line(number) for number in range(5)]
    _, problems = check_lines(written(tmp_path / "input", *lines), CHAT, 4)
    message = "The file has more than the 4 requests that a batch may have: split it."
    assert problems == [Problem("too_many_tasks", message)]
    _, problems = check_lines(written(tmp_path / "input", *[b"{"] * 500), CHAT, 900)
    assert len(problems) == 100


def result(number: int, status: int = 200) -> Result:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    body = {"text": f"answer {number}", "usage": usage} if status == 200 else {"error": {"code": "bad"}}
    return Result(number, f"row {number}", status, json.dumps(body))


def answers(results: Results) -> list[str]:
    return [json.loads(one)["custom_id"] for one in results.answers()]


def test_what_a_kill_has_torn_is_cut_off_and_the_rest_is_there(tmp_path: Path) -> None:
    file = tmp_path / "results"
    results = Results(file, 5, created=1)
    results.append([result(3), result(0, 400)])
    results.append([result(1)])
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        file.write_bytes(whole[:end])
        again = Results(file, 5, created=1)
        assert (len(again), 1 in again, 3 in again, 0 in again) == (2, False, True, True)
        again.append([result(1)])
        assert file.read_bytes() == whole
        assert answers(again) == ["row 1", "row 3"]
    counts = Results(file, 5, created=1).counts
    assert vars(counts) == {
        "total": 5, "completed": 2, "failed": 1, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 6
    }  # fmt: skip


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results"
    results = Results(file, 5, created=1)
    results.append([result(0)])

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            results.append([result(1), result(2)])
    assert (len(results), results.counts.completed) == (1, 1)
    results.append([result(2)])
    again = Results(file, 5, created=1)
    assert answers(results) == answers(again) == ["row 0", "row 2"]
    assert results.counts == again.counts
    assert again.counts.completed == 2


@pytest.mark.parametrize("body", ["[]", "{", '{"usage": null}', '{"usage": {}, "text": "\udc80"}'])
def test_an_answer_that_is_none_fails_its_line_alone(tmp_path: Path, body: str) -> None:
    results = Results(tmp_path / "results", 3, created=1)
    results.append([result(0), Result(1, "row 1", 200, body), result(2)])
    assert answers(results) == ["row 0", "row 2"]
    requests, _ = check_lines(written(tmp_path / "input", *(line(number) for number in range(3))), CHAT, 9)
    [error] = [json.loads(one) for one in results.errors(requests, expired=False)]
    assert (error["custom_id"], error["response"]["status_code"]) == ("row 1", 500)
    assert error["response"]["body"]["error"]["code"] == "internal_error"


def test_errors_come_in_the_order_of_the_input_with_those_that_have_expired(tmp_path: Path) -> None:
    requests, _ = check_lines(written(tmp_path / "input", *(line(number) for number in range(4))), CHAT, 9)
    results = Results(tmp_path / "results", 4, created=1)
    results.append([result(2, 404), result(1)])
    found = [json.loads(one) for one in results.errors(requests, expired=True)]
    assert [one["custom_id"] for one in found] == ["row 0", "row 2", "row 3"]
    assert [one["error"] and one["error"]["code"] for one in found] == ["batch_expired", None, "batch_expired"]
    assert found[1]["response"]["status_code"] == 404
    assert [json.loads(one)["custom_id"] for one in results.errors(requests, expired=False)] == ["row 2"]

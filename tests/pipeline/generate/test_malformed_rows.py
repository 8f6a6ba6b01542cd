"""Kinds of malformed rows: each fails by itself, with a message that names what is wrong, and harms no other row.

All kinds of a format are in one file, between good rows: what is wrong with one must not change a column of the others.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter.requests import SamplingParams
from pipeline.errors import ProblemType
from pipeline.generate.prompts import PromptSettings
from pipeline.generate.row_requests import make_requests
from pipeline.generate.staging import StagingPlan, stage_files
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input
from pipeline.io.parts import StagedInput
from pipeline.output.part_files import error_table
from pipeline.settings import ReadingConfig
from tests.support.staging import content_seed, read_parts

Kind = tuple[Any, ProblemType, str]

BIG = 2**62 + 1
"""A seed that no float holds."""
LONG = "9" * 5000
"""Digits of an integer that Python refuses to read."""


def sampling(value: Any, message: str) -> Kind:
    return {"prompt": "x", "sampling": value}, "BadSampling", message


def seed(value: Any, message: str) -> Kind:
    return {"prompt": "x", "seed": value}, "BadSampling", message


ROWS: dict[str, Kind] = {
    "max_tokens": sampling({"max_tokens": "12"}, "column 'sampling': unknown setting max_tokens: use max_new_tokens"),
    "n": sampling({"n": True}, "unknown setting n: it is an argument of generate and chat"),
    "a long name": sampling({"a" * 9999: 1}, "unknown setting aaaa"),
    "max_new_tokens text": sampling(
        {"max_new_tokens": "12"}, "max_new_tokens must be an integer of at least 1, not '12'"
    ),
    "max_new_tokens none": sampling({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, not 0"),
    "temperature list": sampling({"temperature": [1]}, "temperature must be a finite number, not [1]"),
    "temperature true": sampling({"temperature": True}, "temperature must be a finite number, not True"),
    "temperature object": sampling({"temperature": {}}, "temperature must be a finite number, not {}"),
    "temperature huge": sampling({"temperature": 10**400}, "temperature must be a finite number, not 1000"),
    "temperature nan": sampling({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
    "top_k fraction": sampling({"top_k": 1.5}, "top_k must be an integer of at least 0, not 1.5"),
    "top_p none": sampling({"top_p": 0}, "top_p must be more than 0 and at most 1, not 0"),
    "min_p text": sampling({"min_p": "0.1"}, "min_p must be a finite number, not '0.1'"),
    "repetition_penalty": sampling({"repetition_penalty": 0}, "repetition_penalty must be more than 0, not 0"),
    "presence_penalty": sampling({"presence_penalty": 3}, "presence_penalty must be at least -2 and at most 2, not 3"),
    "stop number": sampling({"stop": 5}, "stop must be a list of non-empty strings, not 5"),
    "stop object": sampling({"stop": {"a": 1}}, "stop must be a list of non-empty strings, not {'a': 1}"),
    "stop empty": sampling({"stop": [""]}, "stop must be a list of non-empty strings, not ['']"),
    "stop null": sampling({"stop": [None]}, "stop must be a list of non-empty strings, not [None]"),
    "stop many": sampling({"stop": ["x"] * 17}, "stop may have up to 16 strings, not 17"),
    "stop endless": sampling({"stop": ["y" * 1001]}, "stop may have strings of up to 1000 characters, not 1001"),
    "unknown": sampling({"heat": 1}, "unknown setting heat; there are"),
    "stop long": sampling({"stop": ["x" * 9999, 1]}, "stop must be a list of non-empty strings, not ['xxxx"),
    "logit_bias number": sampling({"logit_bias": 5}, "logit_bias must map token ids to numbers, not be 5"),
    "logit_bias name": sampling({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers, not be {'a': 1}"),
    "logit_bias text": sampling({"logit_bias": {"1": "x"}}, "logit_bias of token 1 must be a finite number, not 'x'"),
    "logprobs true": sampling({"logprobs": True}, "logprobs must be an integer of at least 0 and at most 20, not True"),
    "ignore_eos": sampling({"ignore_eos": "yes"}, "ignore_eos must be true or false, not 'yes'"),
    "own seed": sampling({"seed": 1.5}, "seed must be an integer of at least 0, not 1.5"),
    "own seed huge": sampling({"seed": 2**63}, "seed must be less than 2**63, not 9223372036854775808"),
    "own seed endless": sampling({"seed": 10**4000}, "seed must be less than 2**63, not 1000"),
    "settings number": sampling(5, "column 'sampling' must be an object of sampling settings, not 5"),
    "settings list": sampling([{"top_k": 1}], "must be an object of sampling settings, not [{'top_k': 1}]"),
    "half a character of a bad word": sampling('{"bad_words": ["\\ud83d"]}', "bad_words has half a character"),
    "settings not JSON": sampling("{", "column 'sampling' is not JSON"),
    "seed negative": seed(-1, "seed must be an integer of at least 0, not -1"),
    "seed text": seed("many", "seed must be an integer of at least 0, not 'many'"),
    "seed long text": seed(LONG, "seed must be an integer of at least 0, not '9999"),
    "seed fraction": seed(1.5, "seed must be an integer of at least 0, not 1.5"),
    "seed float": seed(1e300, "seed must be an integer of at least 0, not 1e+300"),
    "seed true": seed(True, "seed must be an integer of at least 0, not "),
    "seed list": seed([1], "seed must be an integer of at least 0, not [1]"),
    "prompt number": ({"prompt": 5}, "BadRow", "'prompt' is 5, not text"),
    "prompt object": ({"prompt": {}}, "BadRow", "'prompt' is {}, not text"),
    "prompt null": ({"prompt": None}, "BadPrompt", "column 'prompt' is empty"),
    "prompt blank": ({"prompt": " \n"}, "BadPrompt", "column 'prompt' is empty"),
    "prompt missing": ({"category": 1}, "BadPrompt", "column 'prompt' is empty"),
    "half a character": ('{"prompt": "\\ud800"}', "BadRow", "an unpaired surrogate"),
    "an integer without end": (f'{{"prompt": "x", "n": {LONG}}}', "BadRow", "the line is not JSON"),
    "nested": (f'{{"prompt": "x", "n": {"[" * 300}{"]" * 300}}}', "BadRow", "nested too deeply: more than 200 levels"),
    "nested without end": (f'{{"n": {"[" * 99_999}', "BadRow", "the line is n"),
    "null": ("null", "BadRow", "the line is not a JSON object"),
    "cut": ('{"prompt": "x', "BadRow", "the line is not JSON"),
}


def messages(value: Any, message: str) -> Kind:
    return {"messages": value}, "BadPrompt", message


MESSAGES: dict[str, Kind] = {
    "object": messages({}, "column 'messages' must be a list of messages with role and content, not {}"),
    "one message": messages(
        {"role": "user", "content": "x"}, "must be a list of messages with role and content, not {"
    ),
    "number": messages(5, "must be a list of messages with role and content, not 5"),
    "text": messages("hello", "column 'messages' is not JSON, but 'hello'"),
    "long number": messages(LONG, "column 'messages' is not JSON, but '9999"),
    "null": messages(None, "column 'messages' has no messages"),
    "none": messages([], "column 'messages' has no messages"),
    "list of text": messages(["hello"], "message 1 must be an object with role and content, not 'hello'"),
    "list of null": messages([None], "message 1 must be an object with role and content, not None"),
    "empty message": messages([{}], "message 1 has no role"),
    "no content": messages([{"role": "user", "content": "x"}, {"role": "user"}], "message 2 has no content"),
    "role number": messages([{"role": 5, "content": "x"}], "message 1 has the role 5: a role is one word"),
    "content number": messages(
        [{"role": "user", "content": 5}],
        "content of message 1 must be text or a list of typed parts, not 5",
    ),
    "content object": messages(
        [{"role": "user", "content": {}}],
        "content of message 1 must be text or a list of typed parts, not {}",
    ),
    "parts of text": messages(
        [{"role": "user", "content": ["x"]}],
        "content of message 1 must be text or a list of typed parts, not ['x']",
    ),
    "refused by the template": messages([{"role": "forbidden", "content": "x"}], "no such role"),
}


def line(message: str, kind: ProblemType = "BadRequest", **changes: Any) -> Kind:
    """A line of an OpenAI batch, with these changes."""
    return {**GOOD_LINE, **changes}, kind, message


def body(message: str, **changes: Any) -> Kind:
    """A line whose body has these changes."""
    return line(message, body={**GOOD_LINE["body"], **changes})


GOOD_LINE: dict[str, Any] = {
    "custom_id": "good",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "how many"}]},
}
LINES: dict[str, Kind] = {
    "max_tokens": body("Invalid 'max_tokens': Input should be a valid integer, not \"12\".", max_tokens="12"),
    "temperature": body("Invalid 'temperature': Input should be a valid number, not [1].", temperature=[1]),
    "temperature range": body("Input should be less than or equal to 2, not 3.", temperature=3),
    "stop": body("Invalid 'stop': it must be a non-empty string or a list of such, not 5.", stop=5),
    "seed": body("Invalid 'seed': Input should be a valid integer, not 1.5.", seed=1.5),
    "n": body("Invalid 'n': Input should be a valid integer, not true.", n=True),
    "messages": body("Invalid 'messages': it must be a list of messages, not {}.", messages={}),
    "no messages": body("Invalid 'messages': it must have at least 1 and at most 2048 messages, not 0.", messages=[]),
    "message": body("Invalid 'messages[0]': it must be an object, not 5.", messages=[5]),
    "content": body("Invalid 'messages[0].content'", messages=[{"role": "user", "content": 5}]),
    "model": body("Invalid 'model': Input should be a valid string, not 5.", model=5),
    "logit_bias": body("Invalid 'logit_bias", logit_bias=[1]),
    "stream": body("'stream' can only be false in a batch", stream=True),
    "unknown": body("Unknown parameter: 'heat'.", heat=1),
    "tools": body("Invalid 'tools': it must be a list of tools of type \"function\", not [{}].", tools=[{}]),
    "body": line("The body of the request is not a JSON object.", body=5),
    "no body": line("Missing required parameter: 'body'.", body=None),
    "method": line("'method' can only be POST, not 5", method=5),
    "url": line("'url' can only be /v1/chat/completions or /v1/completions, not {}", url={}),
    "custom_id": line("'custom_id' is 5, not text", "BadRow", custom_id=5),
    "empty custom_id": line("the id column 'custom_id' is empty", "BadRow", custom_id=""),
    "prompt": line(
        "Invalid 'prompt': it must be text, a list of texts, or (lists of) token ids, not [-1].",
        url="/v1/completions",
        body={"model": "m", "prompt": [-1]},
    ),
}


def outcomes(path: Path, model: Path, rows_per_part: int) -> list[dict[str, Any]]:
    """Stage a file and make its requests, as a job does; rows with `problem`, `prompt_ids` and `sampling`."""
    reading = ReadingConfig()
    listing = list_input(str(path))
    folder = locate(str(path.parent / f"staged-{rows_per_part}"))
    folder.filesystem.create_dir(folder.path)
    plan = StagingPlan(folder, reading, find_prompts(listing, reading), rows_per_part)
    parts, seen = stage_files(listing, "0", plan)
    settings = PromptSettings(str(model), False, plan.prompts, reading, SamplingParams(), max_length=2048)
    made = []
    for rows in read_parts(StagedInput(folder, tuple(parts), unify(seen, json_objects=listing.of_json))):
        requests = make_requests(rows, settings)
        assert error_table(requests).num_rows == sum(map(bool, requests["problem"].to_pylist()))
        made += requests.to_pylist()
    return made


def as_lines(rows: list[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


GOOD_ROWS: dict[str, Any] = {
    "prompt": {"prompt": "how many", "seed": BIG, "category": {}},
    "messages": {"messages": [{"role": "user", "content": "how many"}], "seed": BIG},
    "openai": GOOD_LINE,
}


@pytest.mark.parametrize("rows_per_part", [1, 128])
@pytest.mark.parametrize(
    ("kinds", "good"), [(ROWS, "prompt"), (MESSAGES, "messages"), (LINES, "openai")], ids=["rows", "messages", "batch"]
)
def test_malformed_rows_in_files_of_lines(
    kinds: dict[str, Kind], good: str, rows_per_part: int, model: Path, tmp_path: Path
) -> None:
    good_row = GOOD_ROWS[good]
    rows = [good_row, *(row for row, _, _ in kinds.values()), good_row]
    path = tmp_path / "in.jsonl"
    path.write_text(as_lines(rows))
    first, *bad, last = outcomes(path, model, rows_per_part)
    for (name, (_, kind, message)), outcome in zip(kinds.items(), bad, strict=True):
        problem = outcome["problem"]
        assert problem is not None, name
        assert problem["type"] == kind, (name, problem)
        assert message in problem["message"], name
        assert len(problem["message"]) < 500, name
    path.write_text(as_lines([good_row]))
    (alone,) = outcomes(path, model, 2)
    for outcome in (first, last):
        assert outcome["problem"] is None
        assert outcome["prompt_ids"] == alone["prompt_ids"]
    if good != "openai":
        assert json.loads(first["sampling"])["seed"] == json.loads(last["sampling"])["seed"] == BIG


@pytest.mark.parametrize("rows_per_part", [1, 128])
def test_a_seed_that_is_no_integer_changes_no_other_seed(rows_per_part: int, model: Path, tmp_path: Path) -> None:
    """In one column, a fraction makes floats of all integers, and a float stands for several of the large ones."""
    path = tmp_path / "in.jsonl"
    path.write_text(as_lines([{"prompt": "x", "seed": value} for value in (BIG, 1.5, None, 7)]))
    big, fraction, none, small = outcomes(path, model, rows_per_part)
    assert fraction["problem"]["message"] == "seed must be an integer of at least 0, not 1.5"
    seeds = [json.loads(outcome["sampling"])["seed"] for outcome in (big, none, small)]
    assert seeds == [BIG, content_seed(0, prompt="x"), 7]


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "seed", "sampling"])
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    schema = pa.schema([("prompt", pa.string()), ("seed", pa.string()), ("sampling", pa.string())])
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema), path)


TEXTS: list[Kind] = [
    ({"prompt": ""}, "BadPrompt", "column 'prompt' is empty"),
    ({"prompt": "x", "seed": "1.5"}, "BadSampling", "seed must be an integer of at least 0, not '1.5'"),
    ({"prompt": "x", "seed": LONG}, "BadSampling", "seed must be an integer of at least 0, not '9999"),
    ({"prompt": "x", "sampling": '{"stop": 5}'}, "BadSampling", "stop must be a list of non-empty strings, not 5"),
    ({"prompt": "x", "sampling": LONG}, "BadSampling", "column 'sampling' is not JSON"),
    ({"prompt": "x", "sampling": "[]"}, "BadSampling", "must be an object of sampling settings, not []"),
]


@pytest.mark.parametrize(("name", "write"), [("in.csv", write_csv), ("in.parquet", write_parquet)])
def test_malformed_rows_in_tables_of_text(
    name: str, write: Callable[[list[dict[str, Any]], Path], None], model: Path, tmp_path: Path
) -> None:
    good = {"prompt": "x", "seed": str(BIG), "sampling": ""}
    write([good, *(row for row, _, _ in TEXTS), good], tmp_path / name)
    first, *bad, last = outcomes(tmp_path / name, model, 128)
    assert [json.loads(one["sampling"])["seed"] for one in (first, last)] == [BIG, BIG]
    for (_, kind, message), outcome in zip(TEXTS, bad, strict=True):
        assert (outcome["problem"]["type"], message in outcome["problem"]["message"]) == (kind, True), outcome


def test_malformed_rows_in_tables_of_other_types(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    table = {
        "prompt": ["x", "x", "x", None],
        "seed": [7.0, None, 1.5, 3.0],  # pandas makes integers floats where one is missing
        "sampling": [None, {"stop": ["a"], "top_k": None}, None, {"stop": [None], "top_k": 1}],
    }
    pa.parquet.write_table(pa.table(table), path)
    seeded, hashed, fraction, bad = outcomes(path, model, 128)
    assert json.loads(seeded["sampling"])["seed"] == 7
    assert json.loads(hashed["sampling"])["seed"] == content_seed(0, sampling={"stop": ["a"]}, prompt="x")
    assert json.loads(hashed["sampling"])["stop"] == ["a"]
    assert "seed must be an integer of at least 0, not 1.5" in fraction["problem"]["message"]
    assert "stop must be a list of non-empty strings, not [None]" in bad["problem"]["message"]

"""Jobs whose outputs are records: by a schema for all rows, or by one of a row's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter import SpeculativeLM
from jobs.report import main as report
from pipeline.errors import InputError
from pipeline.generate.config import parse_config
from tests.pipeline.conftest import Run, write_jsonl

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"fruit": {"enum": ["apples", "pens"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["fruit", "number"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {
    "type": "object",
    "properties": {"nothing": {"const": None}},
    "required": ["nothing"],
    "additionalProperties": False,
}
BOTH = ["--input", "a", "--output", "b"]


def by_line(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {int(row["request_id"].rpartition(":")[2]): row for row in rows}


def test_all_rows_are_records_of_one_schema(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    prompts = [f"how many apples {n}" for n in range(5)]
    rows: list[Any] = [{"prompt": prompt} for prompt in prompts]
    source = write_jsonl(tmp_path / "in.jsonl", [*rows, {"prompt": "pens", "sampling": {"max_new_tokens": 3}}])
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA, indent=4))
    settings = ("--sampling.structured_outputs.json", schema, "--sampling.max_new_tokens", 60)
    done = run(source, *settings, drafter="forced")
    assert done.code == 0, done.stderr
    assert done.errors == []

    *whole, short = done.rows
    expected = plain.chat(prompts, max_new_tokens=60, structured_outputs={"json": SCHEMA})
    assert [row["token_ids"] for row in whole] == [one.token_ids for one in expected]
    for row, one in zip(whole, expected, strict=True):
        record = json.loads(row["text"])
        assert (list(record), record["fruit"] in ("apples", "pens")) == (["fruit", "number"], True)
        assert (row["valid"], row["finish_reason"]) == (True, "stop")
        assert (row["forced_positions"], row["num_forced_tokens"]) == (one.forced, len(one.forced))
        assert row["num_accepted_draft_tokens"] > 0
        assert one.valid
    assert (short["valid"], short["finish_reason"], short["num_output_tokens"]) == (False, "length", 3)
    assert "5 of 6 valid (83%)" in done.stdout

    # The same schema, written in another way, goes on; another one is another job.
    schema.write_text(json.dumps(SCHEMA))
    assert "nothing is left to do" in run(source, *settings).stdout
    schema.write_text(json.dumps({**SCHEMA, "required": ["fruit"]}))
    other = run(source, *settings)
    assert (other.code, "sampling.structured_outputs.json is another" in other.error) == (2, True)
    config = json.loads((done.folder / "run.json").read_text())["config"]
    assert json.loads(config["sampling"]["structured_outputs"]["json"]) == SCHEMA

    assert report([str(done.folder)]) == 0
    page = (done.folder / "report.html").read_text()
    assert "<strong>83.3 %</strong><span>of 6;" in page
    assert page.count("a valid record") == page.count('<pre class="record">') == 5
    assert page.count("no whole record") == 1
    assert "{\n  &#34;fruit&#34;: &#34;" in page
    marked = sum(row["num_forced_tokens"] for row in done.rows)
    assert 0 < page.count('forced" title=') <= marked


def test_rows_have_schemas_of_their_own(run: Run, tmp_path: Path) -> None:
    asked: list[Any] = [
        {"json": SCHEMA},
        {"json": NOTHING},
        {"json": json.dumps(NOTHING), "regex": None},
        {"choice": ["how", "how many"]},
        {"json": {"type": "objekt"}},
        {"json": "{"},
        {"json": SCHEMA, "regex": "a"},
        None,
    ]
    rows = [{"prompt": "how many", "sampling": {"structured_outputs": one}} for one in asked]
    done = run(write_jsonl(tmp_path / "a.jsonl", rows), "--sampling.max_new_tokens", 60)
    assert done.code == 0, done.stderr

    found = by_line(done.rows)
    assert sorted(found) == [1, 2, 3, 4, 8]
    assert json.loads(found[1]["text"]).keys() == {"fruit", "number"}
    assert found[2]["text"] == found[3]["text"] == '{"nothing": null}'
    assert found[4]["text"] in ("how", "how many")
    assert [found[line]["valid"] for line in sorted(found)] == [True, True, True, True, None]
    assert (found[8]["num_forced_tokens"], found[8]["forced_positions"]) == (0, [])

    errors = by_line(done.errors)
    assert sorted(errors) == [5, 6, 7]
    for line, kind, message in [
        (5, "Refused", "objekt"),
        (6, "BadSampling", "structured_outputs.json is not JSON"),
        (7, "BadSampling", "structured_outputs must have one of"),
    ]:
        assert errors[line]["error_type"] == kind
        assert message in errors[line]["message"]


@pytest.mark.slow
def test_a_schema_of_a_table_is_text(run: Run, tmp_path: Path) -> None:
    """As a struct it would have the keys of other rows' schemas, and lose its own nulls."""
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"prompt": "how many", "sampling": {"structured_outputs": {"json": one}}} for one in (SCHEMA, NOTHING)]
    as_text = [{**row, "sampling": json.dumps(row["sampling"])} for row in rows]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "structs.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(as_text), folder / "texts.parquet")
    done = run(folder, "--sampling.max_new_tokens", 60)
    assert done.code == 0, done.stderr
    assert [(row["request_id"], row["valid"]) for row in done.rows] == [
        ("texts.parquet:1", True),
        ("texts.parquet:2", True),
    ]
    assert json.loads(done.rows[1]["text"]) == {"nothing": None}
    assert [row["request_id"] for row in done.errors] == ["structs.parquet:1", "structs.parquet:2"]
    assert all("give structured_outputs.json as JSON text" in row["message"] for row in done.errors)


def test_a_schema_is_given_as_a_file_or_as_it_is(tmp_path: Path) -> None:
    schema, grammar, job = tmp_path / "schema.json", tmp_path / "answer.lark", tmp_path / "job.yaml"
    schema.write_text(json.dumps(NOTHING), encoding="utf-8-sig")
    grammar.write_text('start: "yes" | "no"\n')
    job.write_text(json.dumps({"sampling": {"structured_outputs": {"json": NOTHING}}}))

    def asked(*settings: Any) -> Any:
        return parse_config([*BOTH, *map(str, settings)]).sampling.structured_outputs

    name = "--sampling.structured_outputs"
    assert asked() is None
    by_schema = asked(f"{name}.json", schema)
    assert json.loads(by_schema.json) == NOTHING
    assert by_schema == asked(f"{name}.json", json.dumps(NOTHING)) == asked("--config", job)
    assert by_schema == asked(f'{name}={{"json": {json.dumps(NOTHING)}}}')
    assert asked(f"{name}.grammar", grammar).grammar == grammar.read_text()
    assert asked(f"{name}.grammar", 'start: "yes"').grammar == 'start: "yes"'
    for text in ("[abc]", "[0-9]{2}", "{1}", "a: b", "true", '"é\\n"'):
        assert asked(f"{name}.regex", text).regex == asked(f"{name}.regex={text}").regex == text
    assert asked(f"{name}.choice", '["yes", "no"]').choice == ("yes", "no")
    assert asked(f"{name}.json_object", "true").json_object
    assert asked(f"{name}.json_object", "--sampling.seed", 1).json_object
    assert asked("--config", job, "--sampling.seed", 1) == by_schema
    printed = tmp_path / "printed.yaml"
    printed.write_text(json.dumps(parse_config([*BOTH, f"{name}.json", str(schema)]).as_dict()))
    assert asked("--config", printed) == by_schema


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("json=nowhere.json", "must be a schema, or the name of a file with it: the file nowhere.json cannot be read"),
        ("json={", "json is not JSON: Expecting property name"),
        ("json=[1]", "json must be a JSON schema, which is an object"),
        ("regex=", "regex must be a text that is not empty"),
        ("grammar=nowhere.lark", "must be a grammar, with a rule start, or the name of a file with it: the file"),
        ("choice=[yes, no]", "choice must be text, not True"),
        ("choice=yes", "choice must be a list, not yes"),
        ("json_object=maybe", "json_object must be true or false, not maybe"),
        ("jsn=a", "unknown setting sampling.structured_outputs.jsn"),
    ],
)
def test_mistakes_in_structured_outputs_are_named(setting: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config([*BOTH, f"--sampling.structured_outputs.{setting}"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_schema_is_named(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text("{'type': 'object'}")
    with pytest.raises(InputError, match=r"structured_outputs\.json: the file .*schema\.json is not JSON: Expecting"):
        parse_config([*BOTH, "--sampling.structured_outputs.json", str(file)])


def test_a_schema_that_cannot_be_used_ends_the_job_before_it_begins(refused: Run, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "how many"}])
    done = refused(source, "--sampling.structured_outputs.json", '{"type": "objekt"}')
    assert done.code == 2
    assert done.error.startswith("error: sampling.structured_outputs.json")
    assert "objekt" in done.error
    assert not done.folder.exists()

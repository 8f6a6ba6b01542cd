"""The recipe that makes a table of n-grams: from any input, such as a job's output, to a file that a drafter loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from drafter.methods.cacheback.frozen_table import FrozenTable, load_table, read_metadata
from drafter.text.tokenizers import load_tokenizer, vocabulary_digest
from recipes.cacheback.__main__ import main
from tests.pipeline.conftest import FinishedJob, Run, write_jsonl

SENTENCE = "how many apples and pens does she have"


def make(source: Path, output: Path, model: Path, *settings: Any) -> int:
    return main([str(one) for one in ("--input", source, "--output", output, "--model", model, *settings)])


def load(file: Path, model: Path) -> FrozenTable:
    return load_table(file, vocabulary_digest(load_tokenizer(model)), 320)


def ids(model: Path, text: str = SENTENCE) -> list[int]:
    return list(load_tokenizer(model)(text)["input_ids"])


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"text": SENTENCE}] * 3, ()),
        ([{"words": SENTENCE, "text": "x"}] * 3, ("--column", "words")),
        ([{"messages": [{"role": "user", "content": SENTENCE}]}] * 3, ()),
        ([{"chat": [{"role": "user", "content": SENTENCE}]}] * 3, ("--column", "chat")),
    ],
)
def test_texts_and_chats_become_a_table(
    rows: list[Any], settings: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "table.safetensors"
    assert make(write_jsonl(tmp_path / "in.jsonl", rows), file, model, *settings) == 0
    first, *follower = ids(model)[:4]
    assert next(load(file, model).followers((first,))) == tuple(follower)
    assert json.loads(read_metadata(file)["provenance"])["texts"] == 3
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_token_ids_of_parquet_and_lines_of_text(model: Path, tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"token_ids": [[5, 6, 7, 8, 9], None, []]}), tmp_path / "in.parquet")
    assert make(tmp_path / "in.parquet", tmp_path / "of-ids", model) == 0
    assert load(tmp_path / "of-ids", model).leaders.tolist() == [5, 6]
    (tmp_path / "in.txt").write_text(f"{SENTENCE}\n\n{SENTENCE}\n")
    assert make(tmp_path / "in.txt", tmp_path / "of-lines", model, "--limit", 1) == 0
    assert json.loads(read_metadata(tmp_path / "of-lines")["provenance"])["texts"] == 1


def test_the_size_is_bounded(model: Path, tmp_path: Path) -> None:
    rows = [{"token_ids": np.random.default_rng(row).integers(0, 9, 50).tolist()} for row in range(9)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert make(source, tmp_path / "table", model, "--leaders", 4, "--followers", 2) == 0
    table = load(tmp_path / "table", model)
    assert len(table) == 4
    assert len(table.continuations) == 8


def test_a_job_that_is_submitted_again_changes_nothing(model: Path, tmp_path: Path) -> None:
    source, file = write_jsonl(tmp_path / "in.jsonl", [{"text": SENTENCE}]), tmp_path / "table"
    assert make(source, file, model) == 0
    made, table = read_metadata(file), load(file, model)
    assert make(source, file, model) == 0
    assert read_metadata(file) == made
    assert load(file, model).continuations.tolist() == table.continuations.tolist()


@pytest.mark.parametrize(
    ("row", "settings", "error"),
    [
        ({"text": "x"}, (), "has no text of four tokens in column 'text'"),
        ({"body": SENTENCE}, (), "has none of the columns text, prompt, messages, token_ids (it has body)"),
        ({"body": SENTENCE}, ("--column", "text"), "has no column 'text' (it has body)"),
        ({"token_ids": [5, 6, 7, 999]}, (), "has the token 999, and the model's vocabulary ends at"),
        ({"token_ids": [5, -1, 7, 9]}, (), "has the token -1, and the model's vocabulary ends at"),
        ({"token_ids": "5 6 7 8 9"}, (), "has no text of four tokens in column 'token_ids'"),
        ({"text": SENTENCE}, ("--followers", 0), "followers must be at least 1"),
        ({"text": SENTENCE}, ("--output", "s3://bucket/table"), "is a URI"),
        ({"text": SENTENCE}, ("--output", "."), "is a folder: name a file"),
    ],
)
def test_nonsense_is_refused(
    row: Any, settings: tuple[Any, ...], error: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(write_jsonl(tmp_path / "in.jsonl", [row]), tmp_path / "table", model, *settings) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


def test_a_file_that_is_no_table_stays(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": SENTENCE}])
    assert make(source, source, model) == 2
    assert "is no table of recipes.cacheback" in capsys.readouterr().err
    assert source.exists()


@pytest.mark.slow
def test_from_a_job_s_output_to_a_job_that_drafts_with_it(
    run: Run, finished: FinishedJob, model: Path, tmp_path: Path
) -> None:
    file, source = tmp_path / "table", write_jsonl(tmp_path / "again.jsonl", [{"prompt": "how many pens"}])
    assert make(finished.outcome.folder, file, model) == 0
    rows = finished.outcome.rows
    assert json.loads(read_metadata(file)["provenance"])["tokens"] == sum(len(row["token_ids"]) for row in rows)
    drafts = run(source, output=tmp_path / "drafted", drafter=f"cacheback:{file}")
    assert (drafts.code, drafts.errors) == (0, []), drafts.stderr
    plain = run(source, output=tmp_path / "plain", drafter="none")
    assert [row["token_ids"] for row in drafts.rows] == [row["token_ids"] for row in plain.rows]
    assert json.loads((drafts.folder / "run.json").read_text())["drafters"][0]["heads"].keys() == {f"cacheback:{file}"}
    assert run(source, output=tmp_path / "no", drafter=f"cacheback:{file}x").code == 2


def test_tokens_of_another_model_are_not_taken(
    finished: FinishedJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--input", str(finished.outcome.folder), "--output", str(tmp_path / "table")]) == 2
    assert "was generated by another model" in capsys.readouterr().err

"""Texts of the output's rows and of the node's other engines reach a drafter's memory, and nothing of it does harm."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray

from drafter.drafters.contract import MemorySize, PlainDecoding, TextMemory
from drafter.prompt import Prompt, Span
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts
from pipeline.engines.shared_texts import MemoryFeed, NodeTexts, OtherTexts, earlier_texts, texts_of_node
from pipeline.io.files import locate
from pipeline.output.columns import PROMPT_IMAGES
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run, untimed
from tests.support.waiting import wait_until

# What is remembered of an output: its newest rows, oldest first, as far as its files can be read.


def write(file: Path, first: int, age: int, rows: int = 3, group: int = 1) -> None:
    """Write rows `[first, first + 100]`, … that are `age` seconds old."""
    prompts = [[first + row] for row in range(rows)]
    table = pa.table(
        {"prompt_token_ids": prompts, "token_ids": [[row[0] + 100] for row in prompts], "text": ["x"] * rows}
    )
    pa.parquet.write_table(table, file, row_group_size=group)
    os.utime(file, (10_000 - age, 10_000 - age))


def texts(folder: Path, tokens: int) -> list[list[int]]:
    return [text.tolist() for text in earlier_texts(locate(str(folder)), tokens)]


@pytest.mark.parametrize("group", [1, 2, 5])
def test_the_newest_rows_come_last(tmp_path: Path, group: int) -> None:
    write(tmp_path / "a.parquet", 10, age=1, group=group)
    write(tmp_path / "b.parquet", 50, age=2, group=group)
    expected = [[50, 150], [51, 151], [52, 152], [10, 110], [11, 111], [12, 112]]
    assert texts(tmp_path, 100) == expected
    assert texts(tmp_path, 9) == expected[-4:]
    assert texts(tmp_path, 1) == []


def test_what_cannot_be_read_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.parquet", 10, age=1)
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    pa.parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "other.parquet")
    pa.parquet.write_table(
        pa.table({"prompt_token_ids": [[1], None], "token_ids": [None, [2]]}), tmp_path / "c.parquet"
    )
    assert sorted(texts(tmp_path, 100)) == [[1], [2], [10, 110], [11, 111], [12, 112]]
    assert "torn.parquet is not remembered: " in capsys.readouterr().err
    assert texts(tmp_path / "none", 100) == []


# Each engine gets what the others have said since it looked last, once, and never its own.


def exchange(node: NodeTexts, engine: str, said: Sequence[list[int]]) -> list[list[int]]:
    return [text.tolist() for text in node.exchange(engine, [np.array(text, np.int32) for text in said])]


def test_each_gets_what_the_others_have_said() -> None:
    node = NodeTexts()
    assert exchange(node, "a", [[1]]) == []
    assert exchange(node, "b", []) == []
    assert exchange(node, "a", [[2], [3]]) == []
    assert exchange(node, "b", [[4]]) == [[2], [3]]
    assert exchange(node, "b", []) == []
    assert exchange(node, "a", []) == [[4]]


def test_what_stands_for_images_is_not_shared(tmp_path: Path) -> None:
    """Other rows' placeholders are the same tokens, whatever their images are."""
    spans = [[{"start": 1, "stop": 3, "digest": "00"}], []]
    columns = {"prompt_token_ids": [[1, 9, 9, 2], [1, 2]], PROMPT_IMAGES: spans, "token_ids": [[5], [6]]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert texts(tmp_path, 100) == [[2, 5], [1, 2, 6]]
    feed = MemoryFeed([Listener()], OtherTexts(None, shared=True), "job")
    prompt = Prompt([1, 9, 9, 2], (Span(1, 3, b"\0"),))
    feed.finished(Generation("", [5], "", "stop", 4, DecodeCounts()), Request(prompt))
    assert [text.tolist() for text in feed._said.take(100)] == [[2, 5]]


def test_the_newest_are_kept() -> None:
    node = NodeTexts(capacity=4)
    exchange(node, "b", [])
    exchange(node, "a", [[1, 1], [2, 2], [3, 3]])
    assert exchange(node, "b", []) == [[2, 2], [3, 3]]


def test_an_engine_begins_again_in_another_process() -> None:
    exchange(NodeTexts(), "b", [[1]] * 9)
    node = NodeTexts()
    exchange(node, "a", [[1]])
    assert exchange(node, "b", []) == []
    exchange(node, "a", [[2]])
    assert exchange(node, "b", []) == [[2]]


# A drafter is told of rows in the output and of those of the node's other engines, and harmed by nothing of it.


@dataclass
class Listener(PlainDecoding, TextMemory):
    """Notes what it is told."""

    room: int = 1000
    told: list[list[int]] = field(default_factory=list)

    @property
    def memory(self) -> MemorySize:
        return MemorySize(room=self.room)

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        self.told += [list(map(int, text)) for text in texts]


def finish(feed: MemoryFeed, token: int) -> None:
    feed.finished(Generation("", [token + 1], "", "stop", 1, DecodeCounts()), Request([token]))


def test_rows_of_the_output_are_remembered(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 10, age=1)
    drafter, idle = Listener(), Listener(room=0)
    for one in (drafter, idle):
        MemoryFeed([one], OtherTexts(locate(str(tmp_path)), shared=False), "job").start()
    wait_until(lambda: drafter.told, "the rows")
    assert drafter.told == [[10, 110], [11, 111], [12, 112]]
    assert idle.told == []


def test_engines_of_a_node_tell_each_other_and_outlive_what_is_between_them(local_ray: None) -> None:
    drafters = Listener(), Listener()
    first, second = (MemoryFeed([drafter], OtherTexts(None, shared=True), "told") for drafter in drafters)

    def told() -> bool:
        second.exchange()
        finish(first, 5)
        first.exchange()
        second.exchange()
        return [5, 6] in drafters[1].told

    wait_until(told, "a row")
    ray.kill(texts_of_node("told"))

    def told_again() -> bool:
        finish(first, 7)
        first.exchange()
        second.exchange()
        return [7, 8] in drafters[1].told

    wait_until(told_again, "rows by way of another actor", pause=0.2)
    assert drafters[0].told == []


def test_where_no_actor_can_be_had_nothing_is_told() -> None:
    def connect(run: str) -> Any:
        raise ValueError("another engine is making it")

    drafter = Listener()
    feed = MemoryFeed([drafter], OtherTexts(None, shared=True), "job", connect)
    finish(feed, 5)
    feed.exchange()
    assert drafter.told == []


@pytest.mark.slow
def test_a_job_that_is_submitted_again_and_remembers_writes_the_same_rows(run: Run, finished: FinishedJob) -> None:
    rows = {row["request_id"]: untimed(row) for row in finished.outcome.rows}
    finished.reopen()
    next((finished.outcome.folder / "data").iterdir()).unlink()
    again = run(finished.source, *JOB_SETTINGS, "--writing.rows_per_file", 2, drafter="memory")
    assert again.code == 0, again.stderr
    assert {row["request_id"]: row["token_ids"] for row in again.rows} == {
        name: row["token_ids"] for name, row in rows.items()
    }
    status = json.loads((finished.outcome.folder / "status.json").read_text())
    assert status["memory_bytes"] > 20_000_000


@pytest.mark.slow
def test_two_engines_of_a_job_write_what_one_writes(run: Run, finished: FinishedJob, tmp_path: Path) -> None:
    two = run(
        finished.source,
        *JOB_SETTINGS,
        *("--writing.rows_per_file", 2, "--resources.min_actors", 2, "--resources.max_actors", 2),
        *("--resources.cpus_per_actor", 0.5),
        output=tmp_path / "two",
        drafter="memory",
    )
    assert two.code == 0, two.stderr
    assert {row["request_id"]: row["token_ids"] for row in two.rows} == {
        row["request_id"]: row["token_ids"] for row in finished.outcome.rows
    }

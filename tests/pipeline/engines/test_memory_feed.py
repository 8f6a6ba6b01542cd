"""A drafter is told of rows in the output and of those of the node's other engines, and harmed by nothing of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import ray

from drafter.drafters.contract import DraftMemory, PlainDecoding
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts
from pipeline.engines.shared_texts import MemoryFeed, OtherTexts, texts_of_node
from pipeline.io.files import locate
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run, untimed
from tests.pipeline.engines.test_earlier_texts import write
from tests.support.waiting import wait_until


@dataclass
class Listener(PlainDecoding):
    """Notes what it is told."""

    room: int = 1000
    told: list[list[int]] = field(default_factory=list)

    @property
    def memory(self) -> DraftMemory:
        return DraftMemory(room=self.room)

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        self.told += [list(map(int, text)) for text in texts]


def finish(feed: MemoryFeed, token: int) -> None:
    feed.finished(Generation("", [token + 1], "", "stop", 1, DecodeCounts()), Request([token]))


def test_rows_of_the_output_are_remembered(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 10, age=1)
    drafter, idle = Listener(), Listener(room=0)
    for one in (drafter, idle):
        MemoryFeed(one, OtherTexts(locate(str(tmp_path)), shared=False), "job").start()
    wait_until(lambda: drafter.told, "the rows")
    assert drafter.told == [[10, 110], [11, 111], [12, 112]]
    assert idle.told == []


def test_engines_of_a_node_tell_each_other_and_outlive_what_is_between_them(local_ray: None) -> None:
    drafters = Listener(), Listener()
    first, second = (MemoryFeed(drafter, OtherTexts(None, shared=True), "told") for drafter in drafters)

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
    feed = MemoryFeed(drafter, OtherTexts(None, shared=True), "job", connect)
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

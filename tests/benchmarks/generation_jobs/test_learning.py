"""What the benchmark of the head that learns makes of a job's rows and of the learner's record."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.generation_jobs.learning import JobRun, by_tenth, write_table

START = datetime(2026, 1, 1, tzinfo=UTC)


def test_tenths_are_of_the_rows_in_the_order_in_which_they_ended() -> None:
    rows = [
        {
            "finished_at": START + timedelta(seconds=end),
            "num_output_tokens": 6,
            "num_decode_steps": 6 if end < 10 else 2,
        }
        for end in range(20)
    ]
    betas, rates = by_tenth(rows[::-1])
    assert betas == [1.0] * 5 + [3.0] * 5
    # Nobody knows when the first rows began: they are counted from the end of the first one.
    assert rates == pytest.approx([12.0] + [6.0] * 9)


def test_the_table_says_what_each_arm_took_and_the_learner_did(tmp_path: Path) -> None:
    learning = {"version": 2, "steps": 300, "seconds": 40.0, "state": "learning", "reason": "for 10% of the time"}
    looks = {"driver": [1, 2, 3, 4], "engine": [5, 6, 7, 6]}
    runs = [
        JobRun("none", 100.0, 10, "a", [1.0] * 10, [5.0] * 10, looks, [1.0, 2.0]),
        JobRun(
            "learning",
            80.0,
            10,
            "a",
            [2.0] * 10,
            [6.0] * 10,
            looks | {"learner": [9]},
            [2.0, 4.0],
            learning,
        ),
    ]
    record = {"rows": 20, "slots": 4, "max_new_tokens": 8, "same_tokens": True, "runs": [asdict(run) for run in runs]}
    (tmp_path / "learning.json").write_text(json.dumps(record))
    write_table(tmp_path)
    table = (tmp_path / "learning.md").read_text()
    assert "20 rows, 4 slots, up to 8 new tokens; the same tokens in all runs." in table
    assert "| learning | 80.0 | 80.0 | 0.800 | 2.00 / 4.00 | 2.00 |" in table
    assert "2 versions in 300 steps and 40 s. At the end: learning, for 10% of the time." in table
    assert "| none | 2 / 3 / 4 / 4 | 6 / 7 / 6 / 7 |  |" in table
    assert "| learning | 2 / 3 / 4 / 4 | 6 / 7 / 6 / 7 | 9 / 9 / 9 / 9 |" in table

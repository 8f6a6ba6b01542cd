"""Rows of all files become parts of one size, the same every time."""

from __future__ import annotations

from pathlib import Path

from tests.pipeline.conftest import write_jsonl
from tests.support.staging import staged, write_input

PROMPTS = [f"prompt {number}" for number in range(7)]


def test_the_limit_counts_rows_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_input(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, _, _ = staged(tmp_path / "in", tmp_path / "staged", limit=9)
    assert [one for part in ids for one in part][-2:] == ["b.txt:1", "b.txt:2"]
    assert sum(map(len, ids)) == 9


def test_rows_at_the_beginning_are_left_out_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_input(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, _ = staged(tmp_path / "in", tmp_path / "staged", skip=9, limit=6)
    # They keep the names of their places.
    assert [one for part in ids for one in part] == ["b.txt:3", "b.txt:4", "b.txt:5", "b.txt:6", "b.txt:7", "c.txt:1"]
    assert [row["prompt"] for row in rows] == [*PROMPTS[2:], PROMPTS[0]]


def test_ids_of_their_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": 7}, {"prompt": "y", "id": "b"}, {"prompt": "z"}])
    ids, _, problems = staged(path, tmp_path / "staged", id_column="id")
    assert ids == [["7", "b", "a.jsonl:3"]]
    assert problems == {"a.jsonl:3": "the id column 'id' is empty"}

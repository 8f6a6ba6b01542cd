"""Lines become rows, and lines that are no records keep their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InputError
from pipeline.io.listing import InputListing, list_input
from pipeline.io.reading import read_file
from tests.pipeline.conftest import write_jsonl
from tests.support.staging import staged


def test_json_columns_take_the_type_that_holds_all_values(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "n": 1, "mixed": 1, "late": None, "sampling": {"top_k": 1}},
        {"prompt": "b", "n": 0.5, "mixed": "one", "late": None, "sampling": {"top_k": 1.0}},
        {"prompt": "c", "n": None, "mixed": [1], "late": {"x": 1}},
        {"prompt": "d", "extra": True},
    ]
    _, rows, problems = staged(write_jsonl(tmp_path / "a.jsonl", lines), tmp_path / "staged", rows_per_part=1)
    assert not problems
    assert [row["n"] for row in rows] == [1.0, 0.5, None, None]
    assert [row["mixed"] for row in rows] == ["1", "one", "[1]", None]
    assert [row["late"] for row in rows] == [None, None, {"x": 1}, None]
    assert [row["extra"] for row in rows] == [None, None, None, True]
    # As Arrow numbers, the two would have become equal.
    assert [row["sampling"] for row in rows] == ['{"top_k": 1}', '{"top_k": 1.0}', None, None]


def test_lines_that_are_no_records_are_kept_with_their_place(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "good"},
        "{broken",
        b'{"prompt": "\xff"}',
        "[1]",
        {"prompt": 5},
        "",
        '{"prompt": "\\ud800"}',
        "[" * 100_000,
        {"prompt": "good too"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    ids, rows, problems = staged(path, tmp_path / "staged", rows_per_part=100)
    assert ids == [[f"a.jsonl:{n}" for n in (1, 2, 3, 4, 5, 7, 8, 9)]]
    assert [row["prompt"] for row in rows] == ["good", *[None] * 6, "good too"]
    reasons = ["not JSON", "not UTF-8: byte 13 is 0xff", "not a JSON object", "is 5, not text", "surrogate", "deeply"]
    for problem, reason in zip(problems.values(), reasons, strict=True):
        assert reason in problem


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_line_ends_and_blank_lines(tmp_path: Path, ending: str) -> None:
    (tmp_path / "a.txt").write_bytes(f"\ufeffone\n\ntwo{ending}".encode())
    ids, rows, _ = staged(tmp_path / "a.txt", tmp_path / "staged")
    assert ids == [["a.txt:1", "a.txt:3"]]
    assert [row["prompt"] for row in rows] == ["one", "two"]


def test_long_lines_cross_buffers(tmp_path: Path) -> None:
    prompts = ["x" * 3_000_000, "y", "z" * 2_000_000]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in prompts])
    listing: InputListing = list_input(str(path))
    chunks = list(read_file(listing.filesystem, listing.files[0], 2))
    assert [chunk.numbers for chunk in chunks] == [[1, 2], [3]]
    assert [prompt for chunk in chunks for prompt in chunk.columns["prompt"].to_pylist()] == prompts


def test_columns_without_end_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "x", **{f"column {n * 100 + m}": 1 for m in range(100)}} for n in range(101)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=r"a\.jsonl up to line 100 has more than 10000 different columns: put what"):
        staged(path, tmp_path / "staged", rows_per_part=20)

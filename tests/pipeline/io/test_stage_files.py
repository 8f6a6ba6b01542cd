"""Rows of all files become parts of one size, the same every time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.io.listing import NoIdsError
from pipeline.io.staging import cut
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


def test_a_line_that_is_no_row_leaves_the_others_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "id": 7}\n{"prompt": "\\ud83d", "id": 8}\n{"prompt": "z", "id": 9}\n')
    ids, _, problems = staged(path, tmp_path / "staged")
    assert ids == [["7", "a.jsonl:2", "9"]]
    assert problems == {"a.jsonl:2": "the line has half a character: an unpaired surrogate"}


def test_an_id_column_that_names_not_every_row_is_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": 7}, {"prompt": "y"}])
    with pytest.raises(NoIdsError, match=r"^column 'id' names no row in a\.jsonl:2$"):
        staged(path, tmp_path / "staged")


def table(*lengths: int) -> pa.Table:
    """Rows as `cut` takes them, each with so many bytes of text and four for where it begins."""
    texts = pa.array(["x" * length for length in lengths])
    return pa.table({"row": pa.StructArray.from_arrays([texts], names=["text"])})


def test_a_part_closes_by_its_rows_or_by_its_bytes() -> None:
    parts = list(cut([table(6, 6, 6), table(0, 96, 6), table(496, 6, 6, 6)], most_rows=3, most_bytes=100))
    lengths = [[len(row["text"]) for table in part for row in table["row"].to_pylist()] for part in parts]
    assert lengths == [[6, 6, 6], [0], [96], [6], [496], [6, 6, 6]]


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(1, 200),
)
def test_parts_hold_the_same_rows_however_they_come(tables: list[list[int]], rows: int, nbytes: int) -> None:
    parts = [pa.concat_tables(part) for part in cut([table(*lengths) for lengths in tables], rows, nbytes)]
    whole = table(*[length for lengths in tables for length in lengths])
    assert pa.concat_tables(parts).equals(whole)
    assert parts == [pa.concat_tables(part) for part in cut([whole], rows, nbytes)]
    assert all(part.num_rows == 1 or (part.num_rows <= rows and part.nbytes <= nbytes) for part in parts)
    # None could have taken the next one's first row.
    for part, following in pairwise(parts):
        assert part.num_rows == rows or part.nbytes + following.slice(0, 1).nbytes > nbytes

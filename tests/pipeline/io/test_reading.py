"""Files of every format become the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.staging import staged, write_input

PROMPTS = [f"prompt {number}" for number in range(7)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.txt", "a.jsonl.gz", "a.csv.gz", "a.txt.gz"])
def test_every_format_gives_the_same_rows_and_names(tmp_path: Path, name: str) -> None:
    path = write_input(tmp_path / name, [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, problems = staged(path, tmp_path / "staged")
    assert ids == [[f"{name}:{n}" for n in some] for some in ((1, 2, 3), (4, 5, 6), (7,))]
    assert rows == [{"prompt": prompt} for prompt in PROMPTS]
    assert not problems

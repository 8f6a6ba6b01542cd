"""What is remembered of an output: its newest rows, oldest first, as far as its files can be read."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.engines.shared_texts import earlier_texts
from pipeline.io.files import locate


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

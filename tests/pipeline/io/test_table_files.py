"""Tables keep their types, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import InputError
from pipeline.io.listing import list_input
from pipeline.io.reading import read_file
from tests.support.staging import staged


def test_parquet_types_pass_through_and_csv_values_stay_text(tmp_path: Path) -> None:
    nested = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "when": pa.array([0, 1], pa.timestamp("us")),
            "tags": pa.array([["x"], []], pa.list_(pa.string())),
            "small": pa.array([1, None], pa.int8()),
        }
    )
    pa.parquet.write_table(nested, tmp_path / "a.parquet")
    listing = list_input(str(tmp_path / "a.parquet"))
    (chunk,) = read_file(listing.filesystem, listing.files[0], 10)
    types = {one.name: one.type for one in chunk.columns.schema}
    assert types["when"] == pa.timestamp("us")
    assert types["small"] == pa.int8()
    assert types["prompt"] == pa.string()
    (tmp_path / "b.csv").write_text('prompt,code\n"two\nlines",007\n,\n')
    _, rows, _ = staged(tmp_path / "b.csv", tmp_path / "staged")
    assert rows == [{"prompt": "two\nlines", "code": "007"}, {"prompt": "", "code": ""}]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files(tmp_path: Path, kind: str) -> None:
    table = pa.table({"prompt": pa.array(["a", "b", "c"]).dictionary_encode()})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        writer = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with writer(sink, table.schema) as out:
            out.write_table(table)
    ids, read, _ = staged(tmp_path / "a.arrow", tmp_path / "staged", rows_per_part=2)
    assert ids == [["a.arrow:1", "a.arrow:2"], ["a.arrow:3"]]
    assert read == [{"prompt": text} for text in "abc"]


def test_arrow_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"plain text")
    with pytest.raises(InputError, match="cannot be read as arrow"):
        staged(tmp_path / "a.arrow", tmp_path / "staged")

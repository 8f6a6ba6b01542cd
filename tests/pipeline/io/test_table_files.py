"""Tables keep their types, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute
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


def test_a_repeated_value_is_decoded_a_few_times_at_once(tmp_path: Path) -> None:
    """A file of a kilobyte may say a value of megabytes any number of times."""
    large = pa.array(["a" * (8 << 20), "b"])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0] * 10), large)
    pa.parquet.write_table(pa.table({"prompt": column}), tmp_path / "typed.parquet", compression="zstd")
    pa.parquet.write_table(
        pa.table({"prompt": column}), tmp_path / "plain.parquet", compression="zstd", store_schema=False
    )
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table({"prompt": column})
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    for name in ("typed.parquet", "plain.parquet", "a.arrow"):
        listing = list_input(str(tmp_path / name))
        lengths = []
        for chunk in read_file(listing.filesystem, listing.files[0], 128):
            assert chunk.columns.nbytes < 70 << 20
            lengths += pa.compute.binary_length(chunk.columns["prompt"]).to_pylist()
        assert lengths == [8 << 20, 1, 8 << 20] * 10


def test_a_file_that_is_all_repetition_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.reading._ALWAYS_READ", 1 << 20)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 40), pa.array(["a" * (1 << 20)]))
    pa.parquet.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(InputError, match=r"a\.parquet has [0-9]+ bytes and expands to more than [0-9]+ MiB of rows"):
        staged(tmp_path / "a.parquet", tmp_path / "staged")


def test_a_dictionary_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.reading._LARGEST_DICTIONARY", 1 << 20)
    pa.parquet.write_table(pa.table({"prompt": ["x"], "image": ["a" * (2 << 20)]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column 'image' of .*a\.parquet has a dictionary of 2 MiB, and up to 1 MiB"):
        staged(tmp_path / "a.parquet", tmp_path / "staged")

"""Files of every format become the same rows; damaged ones, and lines that are no records, are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest

from pipeline.errors import InputError
from pipeline.io.listing import InputListing, list_input
from pipeline.io.reading import read_file
from tests.pipeline.conftest import write_jsonl
from tests.support.staging import staged, write_input

# Files of every format become the same rows.


PROMPTS = [f"prompt {number}" for number in range(7)]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.parquet", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz", "a.csv.gz", "A.TXT.GZ"]
)
def test_every_format_gives_the_same_rows_and_names(tmp_path: Path, name: str) -> None:
    path = write_input(tmp_path / name, [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, problems = staged(path, tmp_path / "staged")
    assert ids == [[f"{name}:{n}" for n in some] for some in ((1, 2, 3), (4, 5, 6), (7,))]
    assert rows == [{"prompt": prompt} for prompt in PROMPTS]
    assert not problems


# Lines become rows, and lines that are no records keep their place.


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


def test_a_line_of_blanks_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "one"}\n  \t\r\n\n {"prompt": "two"} \n   ')
    ids, rows, problems = staged(tmp_path / "a.jsonl", tmp_path / "staged")
    assert ids == [["a.jsonl:1", "a.jsonl:4"]]
    assert [row["prompt"] for row in rows] == ["one", "two"]
    assert not any(problems.values())


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


# Tables keep their types, and damaged ones are refused.


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


# Hostile files.


def rewritten(path: Path, table: pa.Table) -> Iterator[Path]:
    """The table's file, with one byte at a time changed, between its schema and its footer."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    schema = 16 + int.from_bytes(content[12:16], "little")
    for place in range(schema, content.rindex(b"\xff\xff\xff\xff")):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        yield path


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_a_changed_arrow_file_gives_its_own_bytes_or_an_error(kind: pa.DataType, tmp_path: Path) -> None:
    """Each byte is changed in turn. A crash would end this process."""
    texts = [f"prompt number {number}, which is long" for number in range(4)]
    values = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts)
    table = pa.table({"prompt": values.cast(kind)})
    refused = 0
    for path in rewritten(tmp_path / "a.arrow", table):
        listing = list_input(str(path))
        content = path.read_bytes()
        try:
            chunks = list(read_file(listing.filesystem, listing.files[0], 10))
        except InputError:
            refused += 1
            continue
        for value in (value for chunk in chunks for value in chunk.values("prompt")):
            assert not isinstance(value, str) or value.encode() in content
    assert refused > 50


def test_a_value_that_cannot_be_is_no_damage(tmp_path: Path) -> None:
    """At any depth: it is judged row by row."""
    digits, moment = (pa.array([2**62, 1]).view(kind) for kind in (pa.decimal64(3), pa.date64()))
    texts = pa.array([b"caf\xe9", b"x"]).view(pa.string())
    columns = {
        "prompt": pa.array(["a", "b"]),
        "text": texts,
        "view": texts.view(pa.binary()).cast(pa.binary_view()).view(pa.string_view()),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1]), texts, safe=False),
        "list": pa.ListArray.from_arrays([0, 1, 2], texts),
        "fixed": pa.FixedSizeListArray.from_arrays(texts, 1),
        "struct": pa.StructArray.from_arrays([texts], ["x"]),
        "map": pa.MapArray.from_arrays([0, 1, 2], texts, texts),
        "json": pa.ExtensionArray.from_storage(pa.json_(), texts),
        "numbers": pa.StructArray.from_arrays([digits, moment], ["decimal", "date"]),
    }
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table(columns)
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    listing = list_input(str(tmp_path / "a.arrow"))
    (chunk,) = read_file(listing.filesystem, listing.files[0], 10)
    assert chunk.values("prompt") == ["a", "b"]
    assert [isinstance(value, str) for value in chunk.values("text")] == [False, True]


def test_columns_of_a_csv_are_counted_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyarrow.csv.open_csv", None)
    (tmp_path / "a.csv").write_text("\n\n" + ",".join(f"c{n}" for n in range(10_001)))
    with pytest.raises(InputError, match=r"a\.csv has more than 10000 different columns"):
        staged(tmp_path / "a.csv", tmp_path / "staged")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.gzip", "a.csv.gz"])
def test_what_expands_without_end_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.reading._ALWAYS_READ", 20 << 20)
    codec = "zstd" if name.endswith("zst") else "gzip"
    with pa.CompressedOutputStream(str(tmp_path / name), codec) as stream:
        stream.write(b"prompt\n")
        for _ in range(64):
            stream.write(b"\n" * (1 << 20))
    listing = list_input(str(tmp_path / name))
    with pytest.raises(InputError, match=r"looks like a decompression bomb|10000000 blank lines after line 1"):
        list(read_file(listing.filesystem, listing.files[0], 10))


def test_a_list_in_a_file_of_lines_is_told_how_to_become_lines(tmp_path: Path) -> None:
    for text in ('[{"prompt": "x"}, {"prompt": "y"}]', '[{"prompt": "x"},\n {"prompt": "y"}]'):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(InputError, match=r"write one object a line, as `jq -c '\.\[\]'` does"):
            staged(tmp_path / "a.json", tmp_path / "staged")


@pytest.mark.parametrize("text", ['[\n {"prompt": "x"},\n {"prompt": "y"}\n]', '{\n "prompt": "x"\n}'])
def test_one_json_value_over_many_lines_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json is one JSON value over many lines: write one object a line"):
        staged(tmp_path / "a.json", tmp_path / "staged")

"""Files of every format become the same staged rows."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.generate.generate_config import ReadingConfig
from pipeline.generate.staged_input import StagedInput, StagedParts, stage_files
from pipeline.io.columns import conform_struct, infer_column, unify_fields
from pipeline.io.files import Location, glob_regex, locate
from pipeline.io.reading import InputListing, PromptSource, find_prompts, list_input, read_file
from tests.pipeline.conftest import write_jsonl

PROMPTS = [f"prompt {number}" for number in range(7)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the path's name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".parquet" in path.name:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif ".csv" in path.name:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif ".txt" in path.name:
        path.write_text("".join(row["prompt"] + "\n" for row in rows))
    else:
        write_jsonl(path, rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def staged(
    source: Path | str, folder: Path, rows_per_part: int = 3, **settings: Any
) -> tuple[list[list[str]], list[dict[str, Any]], dict[str, str]]:
    """Stage an input in this process: request ids by part, rows, and messages of problems by request id."""
    reading = ReadingConfig(**settings)
    listing = list_input(str(source), reading.format, reading.split, reading.subset)
    place = locate(str(folder))
    folder.mkdir(exist_ok=True)
    prompts = find_prompts(listing, reading)
    parts, fields = stage_files(listing, "00000", place, reading, prompts, rows_per_part)
    input = StagedInput(place, tuple(parts), pa.struct(fields))
    tables = [
        task()[0] if isinstance(task(), list) else next(iter(task()))
        for task in StagedParts(input, parts).get_read_tasks(1)
    ]
    whole = pa.concat_tables(tables).to_pylist()
    problems = {row["request_id"]: row["problem"]["message"] for row in whole if row["problem"] is not None}
    return [table["request_id"].to_pylist() for table in tables], [row["row"] for row in whole], problems


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.txt", "a.jsonl.gz", "a.csv.gz", "a.txt.gz"])
def test_every_format_gives_the_same_rows_and_names(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, problems = staged(path, tmp_path / "staged")
    assert ids == [[f"{name}:{n}" for n in some] for some in ((1, 2, 3), (4, 5, 6), (7,))]
    assert rows == [{"prompt": prompt} for prompt in PROMPTS]
    assert not problems


def test_a_folder_a_pattern_and_a_uri(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "_staged/d.jsonl", ".hidden.jsonl"):
        write(folder / name, [{"prompt": name}])
    (folder / "README.md").write_text("not an input")
    everything = ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [file.name for file in list_input(str(folder)).files] == everything
    assert [file.name for file in list_input(folder.as_uri()).files] == everything
    assert [file.name for file in list_input(f"{folder}/*.jsonl").files] == ["a.jsonl", "b.jsonl"]
    assert [file.name for file in list_input(f"{folder}/**/*.jsonl").files] == everything
    assert [file.name for file in list_input(f"{folder}/**/[!a].jsonl").files] == ["b.jsonl", "deep/c.jsonl"]
    assert [file.name for file in list_input(f"{folder}/R*", "text").files] == ["README.md"]
    # Parts run on from one file to the next.
    ids, rows, _ = staged(folder, tmp_path / "staged", rows_per_part=2)
    assert ids == [["a.jsonl:1", "b.jsonl:1"], ["deep/c.jsonl:1"]]
    assert [row["prompt"] for row in rows] == everything


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].jsonl", [{"prompt": "x"}])
    assert [file.name for file in list_input(str(path)).files] == ["a[1].jsonl"]


@given(st.text("ab/.", max_size=8))
def test_patterns_without_wildcards_match_only_themselves(path: str) -> None:
    assert glob_regex(path).fullmatch(path)
    assert not glob_regex(path).fullmatch(path + "a")


def test_the_limit_counts_rows_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, _, _ = staged(tmp_path / "in", tmp_path / "staged", limit=9)
    assert [one for part in ids for one in part][-2:] == ["b.txt:1", "b.txt:2"]
    assert sum(map(len, ids)) == 9


def test_rows_at_the_beginning_are_left_out_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, _ = staged(tmp_path / "in", tmp_path / "staged", skip=9, limit=6)
    # They keep the names of their places.
    assert [one for part in ids for one in part] == ["b.txt:3", "b.txt:4", "b.txt:5", "b.txt:6", "b.txt:7", "c.txt:1"]
    assert [row["prompt"] for row in rows] == [*PROMPTS[2:], PROMPTS[0]]


def test_ids_of_their_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": 7}, {"prompt": "y", "id": "b"}, {"prompt": "z"}])
    ids, _, problems = staged(path, tmp_path / "staged", id_column="id")
    assert ids == [["7", "b", "a.jsonl:3"]]
    assert problems == {"a.jsonl:3": "the id column 'id' is empty"}


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
    _, fields = stage_files(listing, "0", locate(str(tmp_path)), ReadingConfig(), PromptSource("prompt"), 10)
    types = {one.name: one.type for one in fields}
    assert types["when"] == pa.timestamp("us")
    assert types["small"] == pa.int8()
    assert types["prompt"] == pa.string()
    (tmp_path / "b.csv").write_text('prompt,code\n"two\nlines",007\n,\n')
    _, rows, _ = staged(tmp_path / "b.csv", tmp_path / "staged")
    assert rows == [{"prompt": "two\nlines", "code": "007"}, {"prompt": "", "code": ""}]


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


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.integers())
)


@given(st.lists(st.lists(st.fixed_dictionaries({"x": values}), min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_mixture_of_types_loses_a_row_or_a_null(chunks: list[list[dict[str, Any]]]) -> None:
    rows = [
        pa.StructArray.from_arrays([infer_column([row["x"] for row in chunk])], names=["x"])  # as the reader does
        for chunk in chunks
    ]
    target = pa.struct(unify_fields(list(one.type) for one in rows))
    for before in rows:
        after = conform_struct(before, target)
        assert after.type == target
        assert [row["x"] is None for row in after.to_pylist()] == [row["x"] is None for row in before.to_pylist()]


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


def test_where_prompts_are_looked_for(tmp_path: Path) -> None:
    def source(row: dict[str, Any], **settings: Any) -> PromptSource:
        listing = list_input(str(write_jsonl(tmp_path / "a.jsonl", [row])))
        return find_prompts(listing, ReadingConfig(**settings))

    chat = [{"role": "user", "content": "x"}]
    assert source({"prompt": "x", "messages": chat}) == PromptSource("prompt")
    assert source({"messages": chat}) == PromptSource("messages", "messages")
    assert source({"prompt": "x", "messages": chat}, messages_column="messages") == PromptSource("messages", "messages")
    assert source({"q": "x"}, prompt_column="q") == PromptSource("q")
    with pytest.raises(InputError, match=r"has no column 'prompt' \(it has q\): set reading.prompt_column"):
        source({"q": "x"})


def test_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    place: Location = locate(str(tmp_path)) / "x.json"
    place.write_text("one")
    place.write_text("two")
    assert place.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]

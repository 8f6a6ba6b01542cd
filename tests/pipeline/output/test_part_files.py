"""Parts are committed as a whole, once; torn files are found by footers and sums, and no whole part is made again."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from drafter.requests import SamplingParams
from pipeline.io.column_types import replace_column
from pipeline.io.files import Location, locate
from pipeline.io.parts import PROBLEM_TYPE, Part
from pipeline.output.columns import (
    MOST_PROGRAM_COLUMNS,
    PROGRAM,
    RunTraits,
    column_values,
    columns_type,
    wanted_columns,
    with_program_text,
)
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import (
    ResultFile,
    commit_part,
    discard_torn,
    foreign_files,
    is_whole,
    torn_files,
    unify_types,
)
from tests.pipeline.conftest import read_rows
from tests.support.damage import Damage, cut, empty, files_below
from tests.support.faults import DeadlyFiles
from tests.support.parts import BAD_PROMPT, generated_rows, made_generation

# Parts are committed as a whole, once.


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = OutputFolder(locate(str(tmp_path)))
    folder.create()
    return folder


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


def test_a_part_becomes_one_file_of_rows_and_one_of_errors(output: OutputFolder, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "a.b": 1, "text": "theirs"}, {"prompt": "", "a.b": 2, "text": "theirs"}]
    commit_part(output, "p1", generated_rows("p1", rows, [None, BAD_PROMPT]))
    assert files(tmp_path) == ["data/p1.parquet", "errors/p1.parquet"]
    (finished,) = read_rows(tmp_path / "data" / "p1.parquet")
    assert (finished["request_id"], finished["prompt"], finished["a.b"]) == ("p1:0", "a", 1)
    assert (finished["text"], finished["input_text"]) == ("text", "theirs")
    assert (finished["num_output_tokens"], finished["acceptance_histogram"]) == (7, [1, 0, 2])
    (error,) = read_rows(tmp_path / "errors" / "p1.parquet")
    assert error == {
        "request_id": "p1:1",
        "input": '{"prompt": "", "a.b": 2, "text": "theirs"}',
        "error_type": "BadPrompt",
        "message": "empty",
        "attempts": 0,
    }
    assert output.committed() == {"p1"}


def test_a_repeated_write_replaces_its_own_files(output: OutputFolder, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    commit_part(output, "p1", generated_rows("p1", rows, [None, BAD_PROMPT]))
    commit_part(output, "p1", generated_rows("p1", rows, [None, None]))
    assert files(tmp_path) == ["data/p1.parquet"]
    assert len(read_rows(tmp_path / "data" / "p1.parquet")) == 2


def test_what_python_cannot_hold_is_committed_and_shown(output: OutputFolder, tmp_path: Path) -> None:
    columns = {
        "at": pa.array([2**62, 0]).view(pa.timestamp("us", "UTC")),
        "name": pa.array([b"caf\xe9", b"x"]).view(pa.string()),
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())),
        "picture": pa.array([bytes(3000), None]),
    }
    row = pa.StructArray.from_arrays(list(columns.values()), list(columns))
    for problems in ([None, None], [BAD_PROMPT, BAD_PROMPT]):  # then no row is left in one of the two files
        rows = replace_column(generated_rows("p1", [{}, {}], problems), "row", row)
        commit_part(output, "p1", rows)
        if problems[0] is None:
            table = pyarrow.parquet.read_table(tmp_path / "data" / "p1.parquet")
            for name, column in columns.items():
                assert table[name].combine_chunks().equals(column)
    (first, second) = (json.loads(row["input"]) for row in read_rows(tmp_path / "errors" / "p1.parquet"))
    assert first == {"at": f"{2**62} us since 1970", "name": "caf\ufffd", "flag": True, "picture": "(3,000 bytes)"}
    assert second == {"at": "1970-01-01 00:00:00+00:00", "name": "x", "flag": False, "picture": None}


@pytest.mark.parametrize(
    ("point", "is_there"),
    [
        ("before writing", False),
        ("while writing", False),
        ("before errors", False),
        ("after errors", False),
        ("before data", False),
        ("after data", True),
    ],
)
def test_a_write_that_ends_anywhere_commits_all_or_nothing(tmp_path: Path, point: str, is_there: bool) -> None:
    """Stopped at any of its steps, a write leaves no row in `data/` or all of them; repeated, all of them once."""
    points = tmp_path / "points"
    points.mkdir()

    def stop() -> None:
        raise OSError("stopped")

    root = Location(fs.PyFileSystem(DeadlyFiles(str(points), (point,), stop)), str(tmp_path / "out"))
    output = OutputFolder(root)
    output.create()
    whole = generated_rows("p1", [{"prompt": "a"}, {"prompt": "b"}], [None, BAD_PROMPT])
    with pytest.raises(OSError, match="stopped"):
        commit_part(output, "p1", whole)
    assert output.committed() == ({"p1"} if is_there else set())
    commit_part(output, "p1", whole)
    output.delete_temporary()
    assert files(tmp_path / "out") == ["data/p1.parquet", "errors/p1.parquet"]
    assert len(read_rows(tmp_path / "out" / "data" / "p1.parquet")) == 1
    assert [path.name for path in points.iterdir()] == [point.replace(" ", "-")]


def test_a_part_of_only_errors_is_committed_too(output: OutputFolder, tmp_path: Path) -> None:
    commit_part(output, "p1", generated_rows("p1", [{"prompt": ""}], [BAD_PROMPT]))
    assert output.committed() == {"p1"}
    assert read_rows(tmp_path / "data" / "p1.parquet") == []


def test_files_of_no_part_are_named(output: OutputFolder, tmp_path: Path) -> None:
    commit_part(output, "p1", generated_rows("p1", [{}], [None]))
    assert is_whole(output, [Part("p1", 1)])
    commit_part(output, "notes", generated_rows("notes", [{}], [None]))
    assert not is_whole(output, [Part("p1", 1)])
    assert foreign_files(output, [Part("p1", 1)]) == ["data/notes.parquet"]
    for name in ("data/a.txt", "errors/z.parquet"):
        (tmp_path / name).write_bytes(b"x")
    assert foreign_files(output, [Part("p1", 1)]) == ["data/notes.parquet", "errors/z.parquet", "data/a.txt"]


# Torn files are found by footers and sums, and no whole part is made again.


PLACE = locate("/nowhere")


def result(folder: str, name: str, rows: int | None) -> ResultFile:
    return ResultFile(PLACE / folder / name, folder == "data", name, rows)


def names(files: list[ResultFile]) -> list[str]:
    return [file.place.path.removeprefix("/nowhere/") for file in files]


ROWS = {"a": 3, "b": 3, "c": 2}
WHOLE = [result("data", "a", 2), result("errors", "a", 1), result("data", "b", 3), result("data", "c", 2)]


@pytest.mark.parametrize(
    ("files", "torn"),
    [
        (WHOLE, []),
        (WHOLE[2:], []),
        # Damage in either file, or rows that are missing: the file that commits the part goes first.
        ([result("data", "a", None), *WHOLE[1:]], ["data/a", "errors/a"]),
        ([result("errors", "a", None), WHOLE[0], *WHOLE[2:]], ["data/a", "errors/a"]),
        ([WHOLE[0], *WHOLE[2:]], ["data/a"]),
        # Errors of an attempt that was not committed are replaced by the next one; damaged ones could be believed.
        ([WHOLE[1], *WHOLE[2:]], []),
        ([result("errors", "a", None), *WHOLE[2:]], ["errors/a"]),
        # Somebody else's file.
        ([*WHOLE, result("data", "x", None)], []),
    ],
)
def test_what_is_torn(files: list[ResultFile], torn: list[str]) -> None:
    assert names(torn_files(files, ROWS)) == torn


@given(st.data())
def test_what_is_left_is_whole(data: st.DataObject) -> None:
    """Whatever is damaged or gone, every part that is committed afterwards has all of its rows."""
    files = []
    for part in "abcdef":
        errors = data.draw(st.integers(0, 2), label=f"errors of {part}")
        files += [result("data", part, 5 - errors), *([result("errors", part, errors)] if errors else [])]
    wanted = dict.fromkeys("abcdef", 5)
    assert torn_files(files, wanted) == []
    damage = st.sampled_from(["none", "torn", "gone"])
    left = []
    for file in files:
        match data.draw(damage, label=file.place.path):
            case "none":
                left.append(file)
            case "torn":
                left.append(replace(file, rows=None))
    torn = torn_files(left, wanted)
    # A death between two deletions leaves something that is found torn again, or can be believed.
    for deleted in range(len(torn) + 1):
        there = [file for file in left if file not in torn[:deleted]]
        kept = [file for file in there if file not in torn_files(there, wanted)]
        assert all(file.rows is not None for file in kept)
        committed = {file.part for file in kept if file.commits}
        assert sum(file.rows or 0 for file in kept if file.part in committed) == 5 * len(committed)


@pytest.mark.parametrize("damage", [empty, cut])
def test_files_on_disk(tmp_path: Path, damage: Damage, capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    output.create()
    parts = [Part(name, 2) for name in ("p1", "p2", "p3")]
    for part in parts:
        problems = [None, BAD_PROMPT] if part.name == "p2" else [None, None]
        commit_part(output, part.name, generated_rows(part.name, [{"prompt": "a"}, {"prompt": "b"}], problems))
    assert is_whole(output, parts)
    discard_torn(output, parts)
    assert capsys.readouterr().err == ""
    before = files_below(tmp_path)
    torn: Location = output.errors / "p2.parquet"
    damage(Path(torn.path))
    assert not is_whole(output, parts)
    discard_torn(output, parts)
    assert before - files_below(tmp_path) == {"data/p2.parquet", "errors/p2.parquet"}
    assert "results that are not whole are made again: data/p" in capsys.readouterr().err


# What programs returned, of which no type is known before the end.

PROGRAMS = RunTraits(SamplingParams(), rows_have_settings=False, program=True)


def commit_programs(output: OutputFolder, part: str, returned: list[dict[str, Any]]) -> None:
    columns = wanted_columns(PROGRAMS)
    made = column_values(*made_generation(), PROGRAMS, columns)
    rows = pa.table(
        {
            "request_id": pa.array([f"{part}:{n}" for n in range(len(returned))]),
            "row": pa.array([{"prompt": "x", PROGRAM: "theirs"}] * len(returned)),
            "problem": pa.nulls(len(returned), PROBLEM_TYPE),
            "generated": pa.array([made | {PROGRAM: json.dumps(one)} for one in returned], columns_type(columns)),
        }
    )
    commit_part(output, part, rows)


def counted_words(part: int, rows: int, names: int) -> list[dict[str, Any]]:
    return [{"score": n, **{f"{part}.{n}.{word}": 1 for word in range(names)}} for n in range(rows)]


def of_programs(row: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    theirs = {name: value for name, value in row.items() if name not in names and value is not None}
    theirs.update(json.loads(row[PROGRAM]))
    return theirs


@pytest.mark.parametrize("first", [4, MOST_PROGRAM_COLUMNS // 10 + 1])  # rows of the first part
def test_very_many_columns_of_programs_are_one_of_text(output: OutputFolder, tmp_path: Path, first: int) -> None:
    """As columns of JSON they would exceed the limits of a file, and the job would fail at its end."""
    returned = [counted_words(part, first if part == 0 else 50, 10) for part in range(3)]
    for part, rows in enumerate(returned):
        commit_programs(output, f"p{part}", rows)
    for _ in range(2):  # and once more, for the next submission
        unify_types(output)
        paths = sorted((tmp_path / "data").iterdir())
        schemas = [pyarrow.parquet.read_schema(path) for path in paths]
        assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    ours = {*columns_type(wanted_columns(PROGRAMS)).names, "request_id", "prompt", f"input_{PROGRAM}"}
    assert set(schemas[0].names) - ours == ({"score"} if first == 4 else set())
    assert [[of_programs(row, ours) for row in read_rows(path)] for path in paths] == returned
    # A later submission gets what was returned.
    table = pyarrow.parquet.read_table(paths[1])
    again = with_program_text(table, ours - {"score"})[PROGRAM].to_pylist()
    assert list(map(json.loads, again)) == returned[1]


def test_few_columns_of_programs_stay_columns(output: OutputFolder, tmp_path: Path) -> None:
    for part in range(2):
        commit_programs(output, f"p{part}", counted_words(part, 3, 2))
    unify_types(output)
    rows = [row for path in sorted((tmp_path / "data").iterdir()) for row in read_rows(path)]
    assert [row["1.2.1"] for row in rows] == [None] * 5 + [1]
    assert PROGRAM not in rows[0]

"""Parts are committed as a whole, once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyarrow import fs

from pipeline.io.column_types import replace_column
from pipeline.io.files import Location, locate
from pipeline.io.parts import pack
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import PartsDatasink, commit_part
from tests.pipeline.conftest import read_rows
from tests.support.faults import DeadlyFiles
from tests.support.parts import BAD_PROMPT, generated_rows


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
    assert first == {"at": f"{2**62} us since 1970", "name": "caf\ufffd", "flag": True}
    assert second == {"at": "1970-01-01 00:00:00+00:00", "name": "x", "flag": False}


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


def test_the_writer_commits_every_part_and_says_so(output: OutputFolder) -> None:
    rows = [{"prompt": "a"}]
    blocks = [
        pack([("p1", generated_rows("p1", rows, [None])), ("p2", generated_rows("p2", rows, [None]))]),
        pack([("p3", generated_rows("p3", rows, [None]))]),
    ]
    told: list[str] = []
    PartsDatasink(output, told.append).write(blocks, None)
    assert output.committed() == {"p1", "p2", "p3"}
    assert told == ["p1", "p2", "p3"]

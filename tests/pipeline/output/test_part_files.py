"""Parts are committed as a whole, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyarrow import fs

from drafter.requests import Generation, Request, SamplingParams
from drafter.statistics import DecodeCounts
from pipeline.engines.engine_actor import OUTPUT_TYPE, output_columns
from pipeline.generate.staged_input import PROBLEM_TYPE
from pipeline.io.files import Location, locate
from pipeline.output.output_folder import OutputFolder
from pipeline.output.part_files import PartsDatasink, commit_part, free_name
from pipeline.output.summary import histogram_lines, read_totals, summarise
from tests.pipeline.conftest import read_rows
from tests.support.faults import DeadlyFiles

BAD = {"type": "BadPrompt", "message": "empty", "input": None, "attempts": 0}


def block(part: str, rows: list[dict[str, Any]], problems: list[Any], part_rows: int | None = None) -> pa.Table:
    counts = DecodeCounts()
    for accepted in (0, 2, 2):
        counts.record_step(emitted=accepted + 1, accepted=accepted, drafted=4)
    generation = Generation("", [1] * 7, "text", "stop", 3, counts)
    request = Request([1, 2, 3], SamplingParams(seed=5))
    generated = [None if problem else output_columns(generation, request) for problem in problems]
    return pa.table(
        {
            "request_id": pa.array([f"{part}:{index}" for index in range(len(rows))]),
            "row": pa.array(rows),
            "problem": pa.array(problems, PROBLEM_TYPE),
            "part": pa.array([part] * len(rows)),
            "part_rows": pa.array([part_rows or len(rows)] * len(rows)),
            "generated": pa.array(generated, OUTPUT_TYPE),
        }
    )


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = OutputFolder(locate(str(tmp_path)))
    folder.create()
    return folder


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


def test_a_part_becomes_one_file_of_rows_and_one_of_errors(output: OutputFolder, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "a.b": 1}, {"prompt": "", "a.b": 2}]
    PartsDatasink(output).write([block("p1", rows, [None, BAD])], None)
    assert files(tmp_path) == ["data/p1.parquet", "errors/p1.parquet"]
    (finished,) = read_rows(tmp_path / "data" / "p1.parquet")
    assert (finished["request_id"], finished["prompt"], finished["a.b"]) == ("p1:0", "a", 1)
    assert (finished["num_output_tokens"], finished["acceptance_histogram"]) == (7, [1, 0, 2])
    (error,) = read_rows(tmp_path / "errors" / "p1.parquet")
    assert error == {
        "request_id": "p1:1",
        "input": '{"prompt": "", "a.b": 2}',
        "error_type": "BadPrompt",
        "message": "empty",
        "attempts": 0,
    }
    assert output.committed() == {"p1"}


def test_a_repeated_write_replaces_its_own_files(output: OutputFolder, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    commit_part(output, "p1", block("p1", rows, [None, BAD]))
    commit_part(output, "p1", block("p1", rows, [None, None]))
    assert files(tmp_path) == ["data/p1.parquet"]
    assert len(read_rows(tmp_path / "data" / "p1.parquet")) == 2


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
    whole = block("p1", [{"prompt": "a"}, {"prompt": "b"}], [None, BAD])
    with pytest.raises(OSError, match="stopped"):
        commit_part(output, "p1", whole)
    assert output.committed() == ({"p1"} if is_there else set())
    commit_part(output, "p1", whole)
    output.delete_temporary()
    assert files(tmp_path / "out") == ["data/p1.parquet", "errors/p1.parquet"]
    assert len(read_rows(tmp_path / "out" / "data" / "p1.parquet")) == 1
    assert [path.name for path in points.iterdir()] == [point.replace(" ", "-")]


def test_a_part_of_only_errors_is_committed_too(output: OutputFolder, tmp_path: Path) -> None:
    commit_part(output, "p1", block("p1", [{"prompt": ""}], [BAD]))
    assert output.committed() == {"p1"}
    assert read_rows(tmp_path / "data" / "p1.parquet") == []


def test_several_parts_in_one_block_and_a_part_in_pieces(output: OutputFolder) -> None:
    rows = [{"prompt": "a"}]
    both = pa.concat_tables([block("p1", rows, [None]), block("p2", rows, [None])])
    PartsDatasink(output).write([both], None)
    assert output.committed() == {"p1", "p2"}
    with pytest.raises(RuntimeError, match="part p3 came in pieces: 1 of 2 rows"):
        PartsDatasink(output).write([block("p3", rows, [None], part_rows=2)], None)


@pytest.mark.parametrize(
    ("name", "theirs", "free"),
    [("x", ["x"], "x"), ("text", ["text"], "input_text"), ("text", ["text", "input_text"], "input_input_text")],
)
def test_input_columns_give_way(name: str, theirs: list[str], free: str) -> None:
    assert free_name(name, {"text", "seed"}, theirs) == free


def test_the_summary_is_what_the_files_say(output: OutputFolder) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}]
    commit_part(output, "p1", block("p1", rows, [None, None, BAD]))
    commit_part(output, "p2", block("p2", rows, [None, None, None]))
    totals = read_totals(output)
    assert (totals.rows, totals.errors) == (5, 1)
    assert (totals.counts.num_output_tokens, totals.counts.num_decode_steps) == (35, 15)
    text = summarise(output, totals, new_tokens=35, new_rows=6, seconds=10)
    assert "5 finished, 1 errors" in text
    assert "2.33 tokens a base forward" in text
    assert "33% of 60 draft tokens accepted" in text
    assert "4 tokens/s, 0.6 rows/s (6 rows in 00:10)" in text
    bars = histogram_lines(totals.counts)[1:]
    assert [line.split()[0] for line in bars] == ["0", "1", "2"]
    assert [line.split()[-1] for line in bars] == ["33.3%", "0.0%", "66.7%"]
    assert [line.count("█") for line in bars] == [20, 0, 40]

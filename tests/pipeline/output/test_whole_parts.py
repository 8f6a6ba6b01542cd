"""Torn files are found by footers and sums, and no whole part is made again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.io.files import Location, locate
from pipeline.io.parts import Part
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import ResultFile, commit_part, compact, discard_torn, is_whole, torn_files
from tests.support.damage import Damage, cut, empty, files_below
from tests.support.parts import BAD_PROMPT, generated_rows

PLACE = locate("/nowhere")


def result(folder: str, name: str, rows: int | None) -> ResultFile:
    """A file of the parts that its name's letters name."""
    return ResultFile(PLACE / folder / name, folder == "data", frozenset(name), rows)


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
        # Merged files: all that hangs together is made again, and nothing else.
        ([result("data", "ab", 5), result("errors", "a", 1), result("data", "c", 2)], []),
        ([result("data", "ab", None), result("errors", "a", 1), result("data", "c", 2)], ["data/ab", "errors/a"]),
        (
            [result("data", "ab", 5), result("errors", "ac", None), result("data", "c", 1)],
            ["data/ab", "data/c", "errors/ac"],
        ),
        # In the middle of a compaction rows are there twice: in the merged file and in the parts' own.
        ([result("data", "ab", 5), result("data", "b", 3), result("errors", "a", 1), result("data", "c", 2)], []),
        ([result("data", "ab", None), *WHOLE], ["data/ab"]),
        # Parts whose data is lost cannot leave their errors in a merged file.
        ([result("errors", "ac", 2), result("data", "b", 3)], ["errors/ac"]),
        # Somebody else's file.
        ([*WHOLE, result("data", "x", None)], []),
    ],
)
def test_what_is_torn(files: list[ResultFile], torn: list[str]) -> None:
    assert names(torn_files(files, ROWS)) == torn


@given(st.data())
def test_what_is_left_is_whole(data: st.DataObject) -> None:
    """Whatever is damaged or gone, every part that is committed afterwards has all of its rows."""
    parts = "abcdef"
    errors = {part: data.draw(st.integers(0, 2), label=f"errors of {part}") for part in parts}
    cuts = data.draw(st.sets(st.integers(1, 5)), label="merged files end at")
    bounds = [0, *sorted(cuts), 6]
    files = []
    for kind in ("data", "errors"):
        for first, end in pairwise(bounds):
            some = parts[first:end]
            rows = sum(5 - errors[part] if kind == "data" else errors[part] for part in some)
            if kind == "data" or rows:
                files.append(result(kind, some, rows))
    wanted = dict.fromkeys(parts, 5)
    assert torn_files(files, wanted) == []
    damage = st.sampled_from(["none", "torn", "gone"])
    left = []
    for file in files:
        match data.draw(damage, label=file.place.path):
            case "none":
                left.append(file)
            case "torn":
                left.append(ResultFile(file.place, file.commits, file.parts, None))
    torn = torn_files(left, wanted)
    # A death between two deletions leaves something that is found torn again, or can be believed.
    for deleted in range(len(torn) + 1):
        there = [file for file in left if file not in torn[:deleted]]
        kept = [file for file in there if file not in torn_files(there, wanted)]
        assert all(file.rows is not None for file in kept)
        committed = {part for file in kept if file.commits for part in file.parts}
        assert sum(file.rows or 0 for file in kept if file.parts <= committed) == 5 * len(committed)


@pytest.mark.parametrize("damage", [empty, cut])
@pytest.mark.parametrize("compacted", [False, True])
def test_files_on_disk(tmp_path: Path, damage: Damage, compacted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    output.create()
    parts = [Part(name, 2) for name in ("p1", "p2", "p3")]
    for part in parts:
        problems = [None, BAD_PROMPT] if part.name == "p2" else [None, None]
        commit_part(output, part.name, generated_rows(part.name, [{"prompt": "a"}, {"prompt": "b"}], problems))
    if compacted:
        compact(output, 1 << 20)
    assert is_whole(output, parts)
    discard_torn(output, parts)
    assert capsys.readouterr().err == ""
    before = files_below(tmp_path)
    torn: Location = output.errors / "p2.parquet"
    damage(Path(torn.path))
    assert not is_whole(output, parts)
    discard_torn(output, parts)
    gone = {f"data/{'p1-to-p3' if compacted else 'p2'}.parquet", "errors/p2.parquet"}
    assert before - files_below(tmp_path) == gone
    assert "results that are not whole are made again: data/p" in capsys.readouterr().err

"""Which files an input has."""

from __future__ import annotations

from pathlib import Path

from pipeline.io.listing import list_input
from tests.support.staging import staged, write_input


def test_a_folder_a_pattern_and_a_uri(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "_staged/d.jsonl", ".hidden.jsonl"):
        write_input(folder / name, [{"prompt": name}])
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
    path = write_input(tmp_path / "a[1].jsonl", [{"prompt": "x"}])
    assert [file.name for file in list_input(str(path)).files] == ["a[1].jsonl"]

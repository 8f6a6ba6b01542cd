"""Files of an input, and where its prompts are looked for."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import InputError
from pipeline.io.listing import PromptSource, find_prompts, input_fingerprints, list_input
from pipeline.io.reading import read_file
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import write_jsonl
from tests.support.staging import staged, write_input

# Which files an input has.


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


def test_two_stars_stand_for_whole_folders(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"a\*\*.jsonl cannot be listed: .*'\*\*' can only be an entire path component"
    ):
        list_input(f"{tmp_path}/a**.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a[1].jsonl", [{"prompt": "x"}])
    assert [file.name for file in list_input(str(path)).files] == ["a[1].jsonl"]


def dangling(folder: Path) -> Path:
    (folder / "b.jsonl").symlink_to("/nowhere/b.jsonl")
    return folder / "b.jsonl"


def link_to_itself(folder: Path) -> Path:
    (folder / "b.jsonl").symlink_to("b.jsonl")
    return folder / "b.jsonl"


def folder_that_is_gone(folder: Path) -> Path:
    (folder / "more").symlink_to("/nowhere/more")
    return folder / "more"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "b.jsonl")
    return folder / "b.jsonl"


def circle(folder: Path) -> Path:
    (folder / "deep").mkdir()
    (folder / "deep" / "up").symlink_to(folder)
    return folder / "deep" / "up"


def circle_of_two(folder: Path) -> Path:
    (folder / "x").mkdir()
    (folder / "y").mkdir()
    for number in range(4):
        (folder / "x" / f"to_y{number}").symlink_to("../y")
        (folder / "y" / f"to_x{number}").symlink_to("../x")
    return folder


def unreadable_compression(folder: Path) -> Path:
    (folder / "b.jsonl.xz").write_bytes(lzma.compress(b'{"prompt": "y"}\n'))
    return folder / "b.jsonl.xz"


@pytest.mark.parametrize("asked", ["", "/*", "/**"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dangling, "is a link to nothing"),
        (link_to_itself, "is a link to nothing"),
        (folder_that_is_gone, "is a link to nothing"),
        (pipe, "is neither a file nor a folder"),
        (circle, "is a link to a folder that it is in"),
        (circle_of_two, r"/(x/to_y\d/to_x\d|y/to_x\d/to_y\d) is a link to a folder that it is in"),
        (unreadable_compression, "cannot be unpacked"),
    ],
)
def test_rows_that_are_meant_and_not_there_are_missed(
    make: Callable[[Path], Path], reason: str, asked: str, tmp_path: Path
) -> None:
    write_input(tmp_path / "in" / "a.jsonl", [{"prompt": "x"}])
    path = make(tmp_path / "in")
    with pytest.raises(InputError, match=f"^input {re.escape(str(path))} ?{reason}"):
        list_input(f"{tmp_path / 'in'}{asked}")


def test_links_that_lead_somewhere_are_followed(tmp_path: Path) -> None:
    elsewhere = write_input(tmp_path / "elsewhere" / "x.jsonl", [{"prompt": "x"}])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "file.jsonl").symlink_to(elsewhere)
    (folder / "folder").symlink_to(elsewhere.parent)
    (folder / "README.md").symlink_to("/nowhere/README.md")  # which would not be read anyway
    assert [file.name for file in list_input(str(folder)).files] == ["file.jsonl", "folder/x.jsonl"]


def test_links_that_multiply_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.listing._MOST_FOLDERS", 1000)
    write_input(tmp_path / "20" / "a.jsonl", [{"prompt": "x"}])
    for level in range(20):
        (tmp_path / str(level)).mkdir()
        for name in "xy":
            (tmp_path / str(level) / name).symlink_to(f"../{level + 1}")
    with pytest.raises(InputError, match="has more than 1000 folders"):
        list_input(str(tmp_path / "0"))


@pytest.mark.parametrize(
    ("log", "kind"),
    [("_delta_log/0.json", "Delta"), (".hoodie/x.commit", "Hudi"), ("metadata/v1.metadata.json", "Iceberg")],
)
def test_a_table_with_a_log_is_not_its_files(log: str, kind: str, tmp_path: Path) -> None:
    table, file = tmp_path / "lake" / "table", tmp_path / "lake" / "table" / "data" / "x" / "a.jsonl"
    write_input(file, [{"prompt": "x"}])
    write_input(table / log, [{}])
    write_input(tmp_path / "lake" / "plain.jsonl", [{"prompt": "x"}])
    inside = (table, tmp_path / "lake", table / "data", table / "data" / "x", f"{table}/**/a.jsonl", f"{file.parent}/*")
    for source in inside:
        with pytest.raises(
            InputError, match=rf"is of a table \({kind}.*only its log \({log.partition('/')[0]}\) tells"
        ):
            list_input(str(source))
    # What is not of the table, and one file, which is meant as it is.
    assert [one.name for one in list_input(f"{tmp_path}/lake/*.jsonl").files] == ["plain.jsonl"]
    assert [one.name for one in list_input(str(file)).files] == ["a.jsonl"]


def test_hive_folders_are_columns(tmp_path: Path) -> None:
    """As `pyarrow.dataset` reads them, in tables and in files of lines."""
    for name in ("lang=en/year=3/a", "lang=de%20x/year=4/b", "lang=__HIVE_DEFAULT_PARTITION__/year=4/c"):
        for suffix in ("parquet", "jsonl"):
            write_input(tmp_path / suffix / f"{name}.{suffix}", [{"prompt": name[-1]}])
    theirs = pyarrow.dataset.dataset(tmp_path / "parquet", partitioning="hive").to_table().to_pylist()
    for source in (tmp_path / "parquet", tmp_path / "jsonl", f"{tmp_path}/jsonl/**/*.jsonl"):
        _, rows, problems = staged(source, tmp_path / "staged")
        assert sorted(rows, key=str) == sorted(theirs, key=str)
        assert not problems
    assert staged(tmp_path / "jsonl", tmp_path / "staged", prompt_column="lang")[1]
    write_input(tmp_path / "jsonl" / "lang=fr" / "a.jsonl", [{"prompt": "x", "lang": "fr"}])
    with pytest.raises(InputError, match=r"lang=fr/a\.jsonl has a column 'lang', and its folder sets 'lang', too"):
        staged(tmp_path / "jsonl", tmp_path / "staged")


def test_files_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = ["D.JSONL", "a.jsonl", "b.jl", "c.jsonlines", "e.jsonl.gz"]
    for name in [*read, "README.md", "dataset_infos.json", "x.avro", "y.log", "z.xml", "zz.xlsx"]:
        write_input(tmp_path / name, [{"prompt": name}])
    assert [file.name for file in list_input(str(tmp_path)).files] == read
    said = f"input {tmp_path}: left out, as no jsonl by name: x.avro, y.log, z.xml, and 1 more"
    assert capsys.readouterr().err == f"{said}\n"
    write_input(tmp_path / "t.tsv", [{"prompt": "x"}])
    with pytest.raises(InputError, match=r"files of several formats \(csv, jsonl\): set reading.format"):
        list_input(str(tmp_path))
    assert [file.name for file in list_input(str(tmp_path), "jsonl").files] == read
    assert "left out, as no jsonl by name: t.tsv, x.avro, y.log, and 2 more" in capsys.readouterr().err


def test_an_edit_in_the_middle_is_another_input(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (3 << 20))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert input_fingerprints(list_input(str(path))) == [["a.txt", 3 << 20, digest[:16]]]
    status = path.stat()
    before = input_fingerprints(list_input(str(path)))
    with path.open("r+b") as file:
        file.seek(3 << 19)
        file.write(b"y")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    assert input_fingerprints(list_input(str(path))) != before


def test_an_object_is_known_by_a_sample_and_its_time(tmp_path: Path) -> None:
    class Store(pyarrow.fs.FSSpecHandler):
        """Files of a store: not on this machine."""

    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (3 << 20))
    store = pyarrow.fs.PyFileSystem(Store(LocalFileSystem()))
    listing = replace(list_input(str(path)), filesystem=store)
    before = input_fingerprints(listing)
    assert input_fingerprints(listing) == before
    os.utime(path, (1, 1))
    assert input_fingerprints(listing) != before


def test_a_file_that_vanishes_is_missed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_input(tmp_path / "in" / f"{name}.jsonl", [{"prompt": "x"}])
    listing = list_input(str(tmp_path / "in"))
    (tmp_path / "in" / "b.jsonl").unlink()
    with pytest.raises(InputError, match=r"b\.jsonl cannot be read"):
        list(read_file(listing.filesystem, listing.files[1], 10))
    with pytest.raises(InputError, match=r"b\.jsonl cannot be read"):
        input_fingerprints(listing)


# Where prompts are looked for.


def test_where_prompts_are_looked_for(tmp_path: Path) -> None:
    def source(row: dict[str, Any], **settings: Any) -> PromptSource:
        listing = list_input(str(write_jsonl(tmp_path / "a.jsonl", [row])))
        return find_prompts(listing, ReadingConfig(**settings))

    chat = [{"role": "user", "content": "x"}]
    assert source({"prompt": "x", "messages": chat}) == PromptSource("prompt")
    assert source({"messages": chat}) == PromptSource("messages", "messages")
    assert source({"prompt": "x", "messages": chat}, messages_column="messages") == PromptSource("messages", "messages")
    assert source({"q": "x"}, prompt_column="q") == PromptSource("q")
    own = {"prompt": "x", "sampling": {"temperature": 1}}
    assert source(own) == PromptSource("prompt", own_sampling=True)
    with pytest.raises(
        InputError, match=r"has no column 'prompt' \(it has q\): set reading.prompt_column, or for chats"
    ):
        source({"q": "x"})

"""Files of an input, and where its prompts are looked for."""

from __future__ import annotations

import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        (unreadable_compression, "cannot be unpacked"),
    ],
)
def test_rows_that_are_meant_and_not_there_are_missed(
    make: Callable[[Path], Path], reason: str, asked: str, tmp_path: Path
) -> None:
    write_input(tmp_path / "in" / "a.jsonl", [{"prompt": "x"}])
    path = make(tmp_path / "in")
    with pytest.raises(InputError, match=f"^input {re.escape(str(path))} {reason}"):
        list_input(f"{tmp_path / 'in'}{asked}")


def test_links_that_lead_somewhere_are_followed(tmp_path: Path) -> None:
    elsewhere = write_input(tmp_path / "elsewhere" / "x.jsonl", [{"prompt": "x"}])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "file.jsonl").symlink_to(elsewhere)
    (folder / "folder").symlink_to(elsewhere.parent)
    (folder / "README.md").symlink_to("/nowhere/README.md")  # which would not be read anyway
    assert [file.name for file in list_input(str(folder)).files] == ["file.jsonl", "folder/x.jsonl"]


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
    assert source(own, sampling_column="settings") == PromptSource("prompt")
    with pytest.raises(InputError, match=r"has no column 'prompt' \(it has q\): set reading.prompt_column"):
        source({"q": "x"})

"""Files that rows name are those below the operator's folders, by these folders' own file systems."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from drafter.errors import RequestError
from pipeline.io.files import Location
from pipeline.io.named_files import (
    NamedFolder,
    folder_of_input,
    full_address,
    named_folder,
    read_named,
    state_of,
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`in/` is an input's folder, `beside/` is not; links lead from each to the other."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("in/deep/a", "in/b", "beside/a", "in-too/a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "in" / "out").symlink_to(root / "beside")
    (root / "in" / "link").symlink_to(root / "beside" / "a")
    (root / "in" / "near").symlink_to(root / "in" / "b")
    (root / "beside" / "back").symlink_to(root / "in")
    os.mkfifo(root / "in" / "pipe")
    return root


PARTS = ["..", ".", "in", "deep", "a", "b", "out", "link", "near", "back", "beside", "in-too", "pipe", "%2e%2e", ""]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6), st.sampled_from(["", "path", "file://", "FILE://"]))
def test_no_path_leads_out_of_the_folder(tree: Path, parts: list[str], kind: str) -> None:
    folder, source = folder_of_input(str(tree / "in" / "deep" / "a")), "/".join(parts)
    assert folder.place.path == str(tree / "in" / "deep")
    folders = (folder_of_input(str(tree / "in")),)
    if kind:
        source = f"{kind if '://' in kind else ''}{tree}/{source}"
    address = full_address(source, str(tree / "in" / "rows.jsonl"), "")
    try:
        found = read_named(address, folders, 100).decode()
    except RequestError as error:
        found = str(error).partition(",")[0]
    assert found in ("in/deep/a", "in/b", "there is no such file", "it is not in the input's folder")


def test_a_link_that_takes_a_files_place_is_not_followed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, opened = tree / "in" / "swapped", os.open

    def swap(path: str, *given: Any) -> int:
        file.unlink()
        file.symlink_to(tree / "beside" / "a")
        return opened(path, *given)

    file.write_text("mine")
    monkeypatch.setattr("pipeline.io.named_files.os.open", swap)
    with pytest.raises(RequestError, match="being replaced"):
        read_named(str(file), [named_folder(str(tree / "in"))], 100)


@pytest.fixture
def store(tmp_path: Path) -> list[NamedFolder]:
    """A bucket, and a folder of another one, on the file system of an operator."""
    for name in ("mine/deep/a", "mine/b", "other/shown/c", "other/hidden/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    return [NamedFolder("s3", Location(files, one)) for one in ("mine", "other/shown")]


def test_rows_make_no_file_system(store: list[NamedFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.files.locate", lambda uri: pytest.fail(uri))
    for address, found in (
        (full_address("../b", "mine/deep/rows.jsonl", "s3"), "mine/b"),
        ("s3://mine/deep/a", "mine/deep/a"),
        ("S3://other/shown/%63", "other/shown/c"),
    ):
        assert read_named(address, store, 100).decode() == found
        assert state_of(address, store).startswith(f"{len(found)}:")
    for address, why in (
        ("s3://mine/b?endpoint_override=127.0.0.1:1&scheme=http", "no query"),
        ("s3://key:secret@mine/b", "no query, user or password"),
        ("s3://other/hidden/d", "images.folders"),
        (full_address("../../other/hidden/d", "mine/deep/rows.jsonl", "s3"), "images.folders"),
        ("gs://mine/b", "images.folders"),
        ("/etc/hostname", "images.folders"),
        (full_address("/etc/hostname", "mine/deep/rows.jsonl", "s3"), "images.folders"),
        ("b", "give all of the path"),
        ("s3://mine/gone", "no such file"),
        ("s3://mine/b", "limit"),
    ):
        with pytest.raises(RequestError, match=why):
            read_named(address, store, 3)


def test_the_input_says_which_folder_is_its_own(tree: Path) -> None:
    for uri in (f"{tree}/in", f"{tree}/in/b", f"{tree}/in/*.jsonl", f"file://{tree}/in"):
        found = folder_of_input(uri)
        assert (found.scheme, found.place.path) == ("", str(tree / "in"))
    found = folder_of_input("s3://bucket/a/b.jsonl?region=eu-west-1&scheme=http")
    assert (found.scheme, found.place.path) == ("s3", "bucket")


def test_a_pattern_without_a_folder_is_of_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "in")
    for uri in ("*.jsonl", "[ab].jsonl", "**/*.jsonl"):
        assert folder_of_input(uri).place.path == str(tree / "in")

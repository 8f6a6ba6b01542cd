"""The library is compiled once for a machine, and what stands in the way is said."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from drafter.native import build
from drafter.native.build import BuildError, library_path


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafter"


def compiler(folder: Path, script: str) -> str:
    """A program that stands for a compiler; its last argument is the file to make."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor made; do :; done\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, f'echo x >> {tmp_path / "calls"}\necho library > "$made"'))
    first = library_path()
    assert first.read_text() == "library\n"
    assert library_path() == first
    assert (tmp_path / "calls").read_text() == "x\n"
    assert list(empty_cache.iterdir()) == [first]


def test_another_processor_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'echo library > "$made"'))
    first = library_path()
    monkeypatch.setattr(build, "processor", lambda: "another")
    assert library_path() != first


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        library_path()


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo unknown flag >&2\nexit 1"))
    with pytest.raises(BuildError, match="unknown flag"):
        library_path()
    assert not list(empty_cache.iterdir())


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, 'echo library > "$made"'))
    assert library_path().parent == tmp_path / f"drafter-{os.geteuid()}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be kept in"):
        library_path()


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where neither HOME nor a list of users tells
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert build.cache_folder() == tmp_path / f"drafter-{os.geteuid()}"


def test_a_library_that_others_can_change_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'umask 0; echo ours > "$made"'))
    library, evil = library_path(), tmp_path / "evil"
    assert not library.stat().st_mode & 0o022
    for plant in ("writable", "linked", "of another"):
        evil.write_text("theirs")
        library.write_text("theirs")
        if plant == "writable":
            library.chmod(0o775)
        elif plant == "linked":
            library.unlink()
            library.symlink_to(evil)
        elif os.geteuid() == 0:
            os.chown(library, 12345, 12345)
        else:
            continue
        assert library_path() == library
        assert library.read_text() == "ours\n"
    assert evil.read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")
def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, 'echo ours > "$made"'))
    empty_cache.mkdir(parents=True)
    empty_cache.chmod(0o777)
    assert library_path().parent == empty_cache
    assert not empty_cache.stat().st_mode & 0o022
    library_path().write_text("theirs")
    os.chown(empty_cache, 12345, 12345)
    made = library_path()
    assert (made.parent, made.read_text()) == (tmp_path / "drafter-0", "ours\n")
    os.chown(made.parent, 12345, 12345)
    with pytest.raises(BuildError, match="other users can change"):
        library_path()

"""What is committed: no built files, no folders of a machine, and little enough to be carried to a bare one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from drafter.evaluation.environment import without_folders
from tests.support.paths import ROOT

_BUILT = re.compile(r"\.(so|o|a|dylib|pyc|pyd|egg-info|whl)$|(^|/)(\.cache|__pycache__|build|dist)/")
_FOLDERS = re.compile(rb"(?<![\w.~-])/(root|home|tmp|Users|work)/[^\"'` ]*")
_MOST = 52 * 2**20
"""Bytes of all files together; the machines with a GPU that can be borrowed take 64 MiB, packed."""


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("there is no git here to tell what is committed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def test_no_built_file_is_committed(tracked: list[Path]) -> None:
    assert _BUILT.search("drafter/embedded/.cache/drafter/native-a62e8c1a4524fe15.so")
    assert [file for file in tracked if _BUILT.search(str(file.relative_to(ROOT)))] == []


def test_results_name_no_folder_of_a_machine(tracked: list[Path]) -> None:
    results = [file for file in tracked if "results" in file.parts and file.suffix in (".json", ".md")]
    assert len(results) > 50
    assert {str(file): found[0] for file in results if (found := _FOLDERS.search(file.read_bytes()))} == {}


def test_the_tree_is_small_enough_to_be_carried(tracked: list[Path]) -> None:
    assert sum(file.stat().st_size for file in tracked) < _MOST


def test_a_record_names_no_folder_of_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    monkeypatch.setenv("HOME", "/people/me")
    monkeypatch.chdir(tmp_path)
    command = f"--model /people/me/model+ngram --output /scratch/out '{{a: {tmp_path}/a.jsonl}}' ./people/me/b /else"
    assert without_folders(command) == "--model ~/model+ngram --output ~/out '{a: a.jsonl}' ./people/me/b /else"

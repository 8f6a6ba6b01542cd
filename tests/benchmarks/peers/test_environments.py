"""Environments, of packages that need no index."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.peers.environments import Environment, PeerError, python_of

pytestmark = pytest.mark.slow


def package(folder: Path, name: str) -> str:
    """Write a wheel without modules into a folder, and return what pip is asked for."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return f"{name}==1.0"


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wanted = Environment("peer", (package(tmp_path, "kept"), package(tmp_path, "unwanted")), removed=("unwanted",))
    python = python_of(wanted, tmp_path / "environments")
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "kept" in listed
    assert "unwanted" not in listed
    for wheel in tmp_path.glob("*.whl"):
        wheel.unlink()
    assert python_of(wanted, tmp_path / "environments") == python
    with pytest.raises(PeerError, match=r"ERROR: .*kept"):
        python_of(Environment("peer", ("kept==2.0",)), tmp_path / "environments")
    with pytest.raises(PeerError):  # what was there was made of other requirements
        python_of(wanted, tmp_path / "environments")

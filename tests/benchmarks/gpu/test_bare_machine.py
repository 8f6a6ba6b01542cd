"""Both kits on a machine as bare as the one with a GPU: the tree without git, torch, and transformers 5.17 alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu.__main__ import KITS
from benchmarks.gpu.cells import CellFile, Plan
from benchmarks.gpu.page import PAGE_FILE, STAGES
from drafter.embedded import EMBEDDED_BASE
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
_TRANSFORMERS = "transformers==5.17.*"


def link_packages(site: Path, name: str) -> None:
    """Link an installed distribution and all that it requires into `site`, but for what is there."""
    left, known = [name], set[str]()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in known:
            continue
        known.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        wanted = map(Requirement, found.requires or [])
        left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment with nothing but torch and transformers."""
    site = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), _TRANSFORMERS]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip(f"{_TRANSFORMERS} cannot be installed here")
    link_packages(site, "torch")
    for folder in site.glob("pydantic*"):  # a tool of the hub's command line asks for it
        shutil.rmtree(folder)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (home,) = environment.glob("lib/python*/site-packages")
    (home / "bare.pth").write_text(f"{site}\n")
    return environment / "bin" / "python"


@pytest.mark.long
def test_both_kits_run_with_torch_and_transformers_alone(python: Path, tmp_path: Path) -> None:
    tree, output = tmp_path / "tree", tmp_path / "output"
    left_out = (".*", "tests", "docs", "build", "*.egg-info", "__pycache__", "node_modules")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
    quiet = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for name in ("ray", "pydantic", "pyarrow"):
        assert subprocess.run([python, "-c", f"import {name}"], env=quiet, capture_output=True).returncode == 1
    for kit, stages in KITS.items():
        command: list[str | Path] = [
            python,
            "-m",
            "benchmarks.gpu",
            "--kit",
            kit,
            "--tiny",
            "--minutes",
            "60",
            "--output",
            output,
        ]
        done = subprocess.run(command, cwd=tree, env=quiet, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        for stage in dict.fromkeys(name.partition(":")[0] for name in stages):
            lines = [json.loads(line) for line in (output / f"{stage}.jsonl").read_text().splitlines()]
            assert lines
            assert [line for line in lines if "error" in line] == []
            assert all(line["environment"]["versions"]["transformers"].startswith("5.17.") for line in lines)
            exact = [line for line in lines if line["cell"].get("dtype") == "float32" and "differing" in line["values"]]
            assert [line["values"]["differing"] for line in exact] == [0] * len(exact)
            assert exact or stage not in ("identity", "families")
    page = (output / PAGE_FILE).read_text(encoding="utf-8")
    assert "**no result**" not in page
    asked = {name.partition(":")[0] for stages in KITS.values() for name in stages}
    for one in STAGES:
        if one.name not in asked:
            continue
        assert f"## {one.name.capitalize()}" in page
        cells = [str(line["cell"]) for line in CellFile(output, one.name, {}).lines()]
        assert sorted(cells) == sorted(map(str, one.cells(Plan(str(EMBEDDED_BASE), "ctc", tiny=True))))

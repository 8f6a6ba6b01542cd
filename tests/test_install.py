"""The project as it is installed: a wheel, in another environment and from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

import drafter
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True)


def test_a_wheel_generates_in_another_folder_beside_packages_of_our_names(tmp_path: Path) -> None:
    source, site, here = tmp_path / "source", tmp_path / "site", tmp_path / "here"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("drafter", "pipeline", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("drafter_command.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob(f"drafter-{drafter.__version__}-*.whl")
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)

    here.mkdir()
    (here / "prompts.jsonl").write_text('{"prompt": "Tom has 3 boxes of 12 pens."}\n')
    environment = {**os.environ, "PYTHONPATH": str(site)}
    program = "import drafter, pipeline, jobs; print(*(one.__path__[0] for one in (drafter, pipeline, jobs)))"
    told = subprocess.run([sys.executable, "-c", program], cwd=here, env=environment, capture_output=True, text=True)
    assert told.stdout.split() == [str(site / name) for name in ("drafter", "pipeline", "jobs")]
    for name in ("jobs", "pipeline", "recipes"):  # which neither the command nor Ray's workers import
        (here / name).mkdir()
        (here / name / "__init__.py").write_text("raise ImportError('this is the user's own')\n")
    environment["RAY_ADDRESS"] = "local"
    job = "generate --input prompts.jsonl --output out --engine.num_draft_tokens 3 --sampling.max_new_tokens 8"
    done = subprocess.run(
        [site / "bin" / "drafter", *job.split()], cwd=here, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (row,) = pyarrow.parquet.read_table(here / "out" / "data").to_pylist()
    assert row["num_output_tokens"] == 8
    assert json.loads((here / "out" / "run.json").read_text())["state"] == "finished"

"""One pipeline by `ray.data.llm` and by ours: the same rows, on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def test_both_ways_write_the_same_texts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.moving_over", "--output", str(tmp_path), "--rows", "6"]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"6 rows, the same texts: {tmp_path}\n"
    theirs, ours = (pq.read_table(tmp_path / name).sort_by("question").to_pylist() for name in ("ray", "drafter"))
    assert theirs == ours
    assert all(row["answer"] for row in ours)

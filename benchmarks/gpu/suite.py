"""The project's own tests, with their small models on the device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from drafter.errors import LoadError
from drafter.target.loading import pick_device

_ROOT = Path(__file__).resolve().parents[2]
_FILES = (
    "test_identity.py",
    "test_plug_ins.py",
    "engine/test_loop.py",
    "engine/test_growing_rows.py",
    "engine/test_not_finite.py",
    "engine/test_preemption.py",
    "base/test_paged_kv_cache.py",
    "base/test_tree_attention.py",
    "search/test_product.py",
    "verifiers/test_exact.py",
)
_TINY = _FILES[-2:]
_SECONDS = 480


def cells(plan: Plan) -> list[Key]:
    """The files."""
    return [{"file": f"tests/drafter/{file}"} for file in (_TINY if plan.tiny else _FILES)]


def prepare(plan: Plan) -> Measure:
    """See `Stage`.

    Raises:
        LoadError: pytest or hypothesis is not there.
    """
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise LoadError(f"{' and '.join(missing)} is not installed: the tests need it")
    return lambda cell: tested(cell["file"])


def tested(file: str) -> Values:
    """Run the tests of a file that are not slow."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        settings = ["-q", "-m", "not slow", "-o", "addopts=", "-W", "ignore", "--tb=line", f"--junitxml={report}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", file, *settings],
            cwd=_ROOT,
            env=os.environ | {"DRAFTER_TEST_DEVICE": str(pick_device())},
            timeout=_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        return counted(report.read_text(encoding="utf-8"))


def counted(report: str) -> Values:
    """Read a JUnit report: how many tests there are, and which have failed, why."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = {
        case.get("name", ""): (problem.get("message") or "").split("\n")[0]
        for case in cases
        for problem in case
        if problem.tag in ("failure", "error")
    }
    return {"tests": len(cases), "skipped": sum(case.find("skipped") is not None for case in cases), "failed": failed}


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {**cell, **values, "failed": "; ".join(values["failed"]) or "none"}


STAGE = Stage("tests", "The project's tests, with their models on the device.", cells, prepare, row)

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from studies.mutants.faults import Fault, Verdict, faulty, read_faults, verdicts
from tests.support.paths import ROOT


def test_each_fault_is_in_the_tree_once_and_leaves_code_that_is_read() -> None:
    faults = read_faults()
    assert len({fault.name for fault in faults}) == len(faults) >= 80
    for fault in faults:
        text = faulty((ROOT / fault.file).read_text(encoding="utf-8"), fault)
        if fault.file.endswith(".py"):
            ast.parse(text)
        assert fault.tests
        assert all((ROOT / test).is_file() for test in fault.tests), fault.name


@pytest.mark.slow
def test_a_fault_is_noticed_by_the_first_test_that_fails_or_by_none(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n")
    tests = "import sums\n\n\ndef test_one():\n    assert True\n\n\ndef test_sum():\n    assert sums.add(1, 2) == 3\n"
    (tmp_path / "test_sums.py").write_text(tests)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    faults = [
        Fault("a sum is a difference", "sums.py", "a + b", "a - b", ("test_sums.py",)),
        Fault("half is whole", "sums.py", "a / 2", "a", ("test_sums.py",)),
        Fault("a sum never comes", "sums.py", "    return a + b", "    import os; os.abort()", ("test_sums.py",)),
    ]
    test = "test_sums.py::test_sum"
    expected = [
        Verdict(faults[0].name, "fast", test),
        Verdict(faults[1].name, "fast", None),
        Verdict(faults[2].name, "fast", test),
    ]
    assert list(verdicts(tmp_path, faults, "fast")) == expected
    assert "a + b" in (tmp_path / "sums.py").read_text()
    gone = Verdict(faults[0].name, "fast", "test_sums.py::test_gone")
    assert list(verdicts(tmp_path, faults[:1], "fast", [gone])) == expected[:1]

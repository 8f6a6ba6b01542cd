"""Faults of one line, each applied to a copy of the tree, and the first test of its room that fails by it.

A process forks for each run of pytest. After `import_slow` a run takes the time of its tests alone. What is ours is
imported from the copy: nothing here may import it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

LIST = Path(__file__).with_name("faults.yaml")
_SLOW = ("torch", "transformers.models.auto", "hypothesis", "pyarrow.dataset", "fastapi", "ray.data", "ray.serve")
_CPU_SECONDS, _SECONDS = 900, 600  # of a run, and of a test: a fault may never end
_BYTES = 24 << 30
_OUTPUT = "output.txt"  # of the last run
_BROKEN = 99  # exit code of a run that is neither a failure nor a success
_FAILED, _COLLECTION_FAILED = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: What is wrong.
        file: Its file.
        old: Text that this file has once.
        new: What stands there instead.
        tests: Files of the room's tests, the likeliest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Args:
        fault: Its name.
        suite: The tests that ran, of its room: `fast` or `slow` ones.
        test: The first that failed; None if they let it live.
    """

    fault: str
    suite: str
    test: str | None


def read_faults(file: Path = LIST) -> list[Fault]:
    """Return the faults of a list."""
    return [
        Fault(one["fault"], one["file"], one["old"], one["new"], tuple(f"tests/{test}" for test in room["tests"]))
        for room in yaml.safe_load(file.read_text(encoding="utf-8"))
        for one in room["faults"]
    ]


def faulty(text: str, fault: Fault) -> str:
    """Return a file's text with its fault; raise `ValueError` if `old` is not there once."""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has its line {count} times")
    return text.replace(fault.old, fault.new)


def import_slow() -> None:
    """Import what the tests import and is not ours."""
    for module in _SLOW:
        import_module(module)


def verdicts(root: Path, faults: Sequence[Fault], suite: str, before: Sequence[Verdict] = ()) -> Iterator[Verdict]:
    """Apply faults to a copy of the files that git tracks in `root`, and yield what became of each in a suite.

    Args:
        before: Verdicts of an earlier time, whose tests run first.
    """
    killers = {one.fault: one.test for one in before if one.suite == suite and one.test is not None}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        for number, fault in enumerate(faults, start=1):
            with _applied(copy / fault.file, fault, number):
                killer = killers.get(fault.name)
                test = None if killer is None else _first_failure(copy, suite, [killer])
                yield Verdict(fault.name, suite, test or _first_failure(copy, suite, fault.tests))


@contextmanager
def _applied(file: Path, fault: Fault, number: int) -> Iterator[None]:
    text, known = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(faulty(text, fault), encoding="utf-8")
    os.utime(file, (number, number))  # or compiled code of the same size and second would be taken for it
    yield
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))


def _first_failure(copy: Path, suite: str, tests: Sequence[str]) -> str | None:
    """Run tests in a process of their own; return the one that failed first, or in which the process ended."""
    progress = copy / "progress.json"
    progress.write_text(json.dumps(None))
    child = os.fork()
    if not child:
        try:
            _run(copy, suite, tests, progress)
        except BaseException:
            traceback.print_exc()
        os._exit(_BROKEN)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have started and not ended
    ended = os.waitstatus_to_exitcode(status)
    if ended == _BROKEN:
        raise RuntimeError(f"no test ran: {(copy / _OUTPUT).read_text()[-2000:]}")
    there: str | None = json.loads(progress.read_text())
    return there if ended in (_FAILED, _COLLECTION_FAILED) or ended < 0 else None


def _run(copy: Path, suite: str, tests: Sequence[str], progress: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    os.setpgid(0, 0)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:1] = [str(copy)]
    output = os.open(copy / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    chosen = "slow" if suite == "slow" else "not slow"
    settings = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={_SECONDS}", "-m", chosen]
    os._exit(pytest.main([*settings, *tests], plugins=[_Progress(progress)]))


class _Progress:
    """Keeps the name of the test that runs, or of the one that failed."""

    def __init__(self, file: Path) -> None:
        self._file, self._failed = file, False

    def _note(self, name: str) -> None:
        if not self._failed:
            self._file.write_text(json.dumps(name))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(report.nodeid)
            self._failed = True

"""What tests cost: core seconds (user and system) and seconds of each file and fixture, as tables.

    pytest -p tests.support.costs --costs build/costs -m "not slow" …
    python -m tests.support.costs build/costs

A process counts itself and those of its children that have ended. Ray's workers and engines of jobs are children of
others, so that a test that waits for them shows many seconds and few core seconds. What all processes together take is
counted once a second, but for the last one of each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

_ROWS = 60
_ALL = "all.json"
_RUN = "DRAFTER_TEST_RUN"
"""Variable by which the processes of a run are known, whoever started them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", help="folder in which each process writes what its tests cost")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--costs"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(_Costs(Path(folder) / f"{os.getpid()}.jsonl"))
        if _RUN not in os.environ:
            config.pluginmanager.register(_AllProcesses(Path(folder) / _ALL))


class _Costs:
    def __init__(self, file: Path) -> None:
        self._file = file

    @contextmanager
    def _counted(self, **what: str) -> Iterator[None]:
        wall, core = time.monotonic(), _core_seconds()
        yield
        cost = {"seconds": time.monotonic() - wall, "core": _core_seconds() - core}
        with self._file.open("a") as file:
            file.write(json.dumps(what | cost) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._counted(test=item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        with self._counted(fixture=fixturedef.argname, of=fixturedef.baseid, scope=str(fixturedef.scope)):
            return (yield)


class _AllProcesses:
    def __init__(self, file: Path) -> None:
        self._file, self._over = file, threading.Event()
        self._seconds: dict[tuple[int, float], float] = {}
        os.environ[_RUN] = uuid.uuid4().hex
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            for process in psutil.process_iter():
                with suppress(psutil.Error):  # it has ended
                    if process.pid == os.getpid() or process.environ().get(_RUN) == os.environ[_RUN]:
                        times = process.cpu_times()
                        self._seconds[process.pid, process.create_time()] = times.user + times.system

    def pytest_unconfigure(self) -> None:
        self._over.set()
        self._thread.join()
        self._file.write_text(json.dumps(sum(self._seconds.values())))


def _core_seconds() -> float:
    return sum(os.times()[:4])


def tables(folder: Path) -> str:
    """Return tables of the dearest files, tests and fixtures of a run, in Markdown."""
    files, tests, fixtures = (defaultdict[str, list[float]](lambda: [0.0, 0.0, 0]) for _ in range(3))
    for line in (line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()):
        cost = json.loads(line)
        if "test" in cost:
            places = [(files, cost["test"].partition("::")[0]), (tests, cost["test"].partition("[")[0])]
        else:
            places = [(fixtures, f"{cost['fixture']} ({cost['scope']}, {cost['of'] or 'plug-in'})")]
        for table, name in places:
            table[name] = [
                one + more for one, more in zip(table[name], (cost["core"], cost["seconds"], 1), strict=True)
            ]
    text = [f"All processes: {json.loads((folder / _ALL).read_text()):.0f} core seconds.", ""]
    for title, table in (("file", files), ("test", tests), ("fixture", fixtures)):
        core, seconds, times = (sum(column) for column in zip(*table.values(), strict=True))
        text += [f"| {title} | core seconds | seconds | times |", "| --- | --- | --- | --- |"]
        text += [f"| all | {core:.0f} | {seconds:.0f} | {times:.0f} |"]
        dearest = sorted(table.items(), key=lambda one: -one[1][1])[:_ROWS]
        text += [f"| {name} | {core:.1f} | {seconds:.1f} | {times:.0f} |" for name, (core, seconds, times) in dearest]
        text += [""]
    return "\n".join(text)


if __name__ == "__main__":
    print(tables(Path(sys.argv[1])))

"""What all tests share: small random models, and which tests run in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import drafter  # noqa: F401  before torch, because it decides how torch's threads wait

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from drafter.target_model.model import BaseModel
from tests.support.latencies import give_latencies, measure_latencies
from tests.support.models import random_model
from tests.support.paths import ROOT
from tests.support.prepared_workers import ForkedPreparation
from tests.support.properties import register_profiles

register_profiles()

# Tiny models gain nothing from more threads, and lose much where cores are shared.
torch.set_num_threads(1)

SHARED_FIXTURES = ("local_ray", "endpoint", "cluster", "deployed", "bucket", "local")
"""Fixtures that start processes: all tests that use one run in the same pytest process, so that it is made once."""
BEGIN_FIRST = (*SHARED_FIXTURES, "long")
"""Groups in the order in which they begin. All other tests follow: at the end no process waits long for the other."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that say of themselves that all of their tests are slow, where no slow ones are asked for.

    To import them takes each process seconds.
    """
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    return "\npytestmark = pytest.mark.slow" in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each process import other files first: what one of them has compiled is there for the others.

    All of them collect all files, and from a fresh clone would compile the same at the same time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    folders = [path for path in map(Path, session.config.args) if path.is_dir()]
    files = [file for folder in folders for file in sorted(folder.resolve().rglob("test_*.py"))]
    files = [file for file in files if not pytest_ignore_collect(file, session.config)]
    worker, count = os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"), os.environ["PYTEST_XDIST_WORKER_COUNT"]
    begin = len(files) * int(worker) // int(count)
    for file in [*files[begin:], *files[:begin]]:
        with suppress(Exception, pytest.skip.Exception):  # where it is collected it fails again, and is told
            import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by the expensive fixture they share, for `--dist loadgroup`, and have what takes long begin first."""
    places = {}
    for item in items:
        names = [*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())]
        group = next((name for name in BEGIN_FIRST if name in names), None)
        places[item] = BEGIN_FIRST.index(group) if group else len(BEGIN_FIRST)
        if group in SHARED_FIXTURES:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=places.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have the tests of a file run in one process, which makes once what they share, unless they have a group."""
    from xdist.scheduler import LoadGroupScheduling  # only where several processes run tests

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("::")[0]

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures of other processes as they happen: a long run may be ended before its summary."""
    if report.failed and hasattr(report, "node"):
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


def pytest_collection_finish() -> None:
    """Modules stay: the garbage collector need not look through their hundreds of thousands of objects each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_base() -> BaseModel:
    """A random Llama of three layers with a vocabulary of 97.

    It is run by the model's own code on every machine. The native library takes heads as small as these where the
    processor's vectors are, and would ask no module that a test has changed.
    """
    return BaseModel(random_model("llama"), native=False)


@pytest.fixture(scope="session", autouse=True)
def _given_latencies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        give_latencies(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_preparations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.confined._Prepared", ForkedPreparation)
        yield


@pytest.fixture(scope="module")
def started_preparations() -> Iterator[None]:
    """Processes for confined work are started, as they are where nobody tests: by this one, as its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.confined._Prepared", ForkedPreparation.__base__)
        yield


@pytest.fixture(autouse=True)
def _measured_latencies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("measuring") is not None:
        measure_latencies(monkeypatch)

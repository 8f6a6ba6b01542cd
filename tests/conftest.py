"""What all tests share: small random models, and which tests run in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import drafter  # noqa: F401  before torch, because it decides how torch's threads wait

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from drafter.target_model.model import BaseModel
from tests.support.latencies import give_latencies, measure_latencies
from tests.support.models import random_model
from tests.support.properties import register_profiles

register_profiles()

# Tiny models gain nothing from more threads, and lose much where cores are shared.
torch.set_num_threads(1)

SHARED_FIXTURES = ("local_ray", "endpoint", "cluster", "deployed", "bucket", "local")
"""Fixtures that start processes: all tests that use one run in the same pytest process, so that it is made once."""
BEGIN_FIRST = (*SHARED_FIXTURES, "long")
"""Groups in the order in which they begin. All other tests follow: at the end no process waits long for the other."""


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


@pytest.fixture(autouse=True)
def _measured_latencies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("measuring") is not None:
        measure_latencies(monkeypatch)

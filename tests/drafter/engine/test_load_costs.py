"""What is measured of longer texts and drawn tokens, with steps that take as long as a test says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from drafter import devices
from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, ExactVerifier, Verified, Verifier
from drafter.budget.latency_table import LatencyTable
from drafter.engine.batch import BatchState
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import with_load_costs
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.models import AdversarialDrafter

TABLE = LatencyTable(np.array([1.0, 2.0, 4.0]), (0, 3, 7), np.ones((3, 3)), np.zeros((1, 3, 3)))


class AsksEverywhere(ExactVerifier):
    lossless = False


def measured(base: BaseModel, patch: pytest.MonkeyPatch, verifier: Verifier, *, queued: bool = False) -> LatencyTable:
    """Measure where a forward takes a second a position and node, and a drawn token 5 seconds, a filtered one 9."""
    state = BatchState(base, AdversarialDrafter(0, nodes=7, depth=4), 4, 96, StageTimes())
    step = DeviceStep(base, verifier, state, packs=False)
    queue = QueuedStep(step, None) if queued else None
    verify, accept, clock = step.verify, verifier.accept, 0.0

    def timed_verify(tree: TokenTree, kv_length: int) -> Verified:
        nonlocal clock
        clock += float(state.lengths[0]) * tree.size
        return verify(tree, kv_length)

    def timed_accept(verified: Verified, sampling: RowSampling) -> Accepted:
        nonlocal clock
        mode = sampling.mode
        clock += len(verified.tree.tokens) * (9 if mode.nucleus else 5 if mode.random else 0)
        return accept(verified, sampling)

    def timed(device: torch.device, work: Callable[[], object]) -> tuple[object, float]:
        began = clock
        return work(), clock - began

    patch.setattr(step, "verify", timed_verify)
    patch.setattr(verifier, "accept", timed_accept)
    patch.setattr(devices, "timed", timed)
    with torch.inference_mode():
        table = with_load_costs(step, queue, TABLE, 48)
    assert state.mode.likeliest
    assert state.sampling.temperature.tolist() == [0.0] * 4
    assert table.length == 48
    assert {name: seconds.tolist() for name, seconds in table.choosing.items()} == {
        "drawn": [5.0, 10.0, 20.0],
        "filtered": [9.0, 18.0, 36.0],
    }
    return table


@torch.inference_mode()
def test_a_token_more_is_read_for_each_node_on_a_cpu(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    table = measured(tiny_base, monkeypatch, ExactVerifier())
    assert table.longer is not None
    assert table.longer.tolist() == [1.0, 1 + 3.0, 8.0]
    assert table.choices is None  # only what comes out is chosen


@torch.inference_mode()
def test_a_verifier_that_asks_at_all_nodes_does(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    table = measured(tiny_base, monkeypatch, AsksEverywhere())
    assert table.choices is not None
    assert table.choices.tolist() == [1.0, 4.0, 8.0]


def test_steps_that_are_queued_as_a_whole(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step is timed, and says of trees what it says; all levels of a tree choose, whoever reads it."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    table = measured(tiny_base, monkeypatch, ExactVerifier(), queued=True)
    assert table.longer is not None
    assert table.longer.tolist() == [1.0] * 3
    assert table.choices is not None
    assert table.choices.tolist() == [1.0, 4.0, 5.0]

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.acceptance.contract import ExactVerifier
from drafter.budget.latency_table import LatencyTable, load_costs, save_costs
from drafter.engine import warm_up
from drafter.engine.batch import BatchState
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import step_costs
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.statistics import StageTimes
from drafter.target.model import BaseModel

TABLE = LatencyTable(
    np.array([1.0, 4.0]),
    (0, 3),
    np.array([[0.1, 0.2], [0.3, 0.4]]),
    np.array([[[0.0, 0.01], [0.0, 0.02]], [[0.0, 0.03], [0.0, 0.04]]]),
    48,
    np.array([1e-6, 2e-6]),
    {"drawn": np.array([0.001, 0.002])},
)
SAMPLES = (0.1, 0.2)
SUBJECT: dict[str, Any] = {"machine": ["x", 2], "layers": (1, 2)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "drafter" / "costs"


def assert_equal(found: LatencyTable, expected: LatencyTable) -> None:
    for name, value in asdict(expected).items():
        np.testing.assert_equal(getattr(found, name), value)


def test_tables_come_back_as_they_were_and_for_their_subject_alone() -> None:
    assert load_costs(SUBJECT) is None
    for table in (TABLE, replace(TABLE, choices=np.array([1.0, 4.0]), longer=None)):
        save_costs(SUBJECT, table, (0.25, 0.5))
        found = load_costs(SUBJECT)
        assert found is not None
        assert_equal(found[0], table)
        assert found[1] == (0.25, 0.5)
    assert load_costs({**SUBJECT, "machine": ["y", 2]}) is None


@pytest.mark.parametrize("changed", [{"table": {}}, {"samples": [0.0, 0.1]}, {"samples": [0.1]}, {"samples": None}])
def test_a_damaged_file_is_none(cache: Path, changed: dict[str, Any]) -> None:
    save_costs(SUBJECT, TABLE, SAMPLES)
    (file,) = cache.iterdir()
    whole = json.loads(file.read_text())
    for content in ("", "{}", json.dumps({**whole, **changed})):
        file.write_text(content)
        assert load_costs(SUBJECT) is None


def test_a_cache_that_cannot_be_written_to_costs_nothing_but_time(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    save_costs(SUBJECT, TABLE, SAMPLES)
    assert load_costs(SUBJECT) is None


def test_a_second_start_measures_nothing_unless_steps_take_another_time(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*_: Any) -> LatencyTable:
        measured.append(1)
        return table

    seconds = [0.125, 0.25]

    def start(name: str | None = "ngram", slots: int = 4) -> LatencyTable:
        state = BatchState(tiny_base, NgramDrafter(6), slots, 96, StageTimes())
        return step_costs(DeviceStep(tiny_base, ExactVerifier(), state, packs=False), None, name)

    table = TABLE
    monkeypatch.setattr(warm_up, "measure_steps", measure)
    monkeypatch.setattr(warm_up, "_SAMPLE_ROUNDS", 1)
    monkeypatch.setattr(warm_up, "_least_seconds", lambda *_: seconds.pop(0))
    assert_equal(start(), TABLE)
    seconds = [0.09375, 0.3125]
    assert_equal(start(), TABLE.changed(0.75, 1.25))
    assert (len(measured), seconds) == (1, [])
    # Draft tokens take twice as long now.
    seconds, table = [0.125, 0.5, 0.125, 0.5], replace(TABLE, length=40)
    assert_equal(start(), table)
    seconds = [0.125, 0.5]
    assert_equal(start(), table)
    assert len(measured) == 2
    seconds = [0.125, 0.25] * 2
    start(slots=5)
    start("ngram+memory")
    start(None)
    assert len(measured) == 5

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
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
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from tests.support.models import AdversarialDrafter

TABLE = LatencyTable(
    np.array([1.0, 4.0]),
    (0, 3),
    np.array([[0.1, 0.2], [0.3, 0.4]]),
    np.array([[[0.0, 0.01], [0.0, 0.02]], [[0.0, 0.03], [0.0, 0.04]]]),
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
    save_costs(SUBJECT, TABLE, (0.25, 0.5))
    found = load_costs(SUBJECT)
    assert found is not None
    assert_equal(found[0], TABLE)
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


@dataclass
class Machine:
    """Its clock is virtual: plain steps of one row and those of the largest tree take what they are said to.

    Others have `busy` of its processors.
    """

    seconds: tuple[float, float]
    measured: int = 0
    busy: float = 0.0

    def timed(self, device: object, work: Any) -> tuple[None, float]:
        return None, self.seconds[work.args[1] > 0]

    def measure(self, *_: Any) -> LatencyTable:
        self.measured += 1
        return replace(TABLE, verify=np.array(self.seconds) * [[1.0], [2.0]])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(SAMPLES)
    monkeypatch.setattr(warm_up, "measure_steps", made.measure)
    monkeypatch.setattr("drafter.devices.timed", made.timed)
    monkeypatch.setattr("drafter.devices.watch_others", lambda: lambda: made.busy)
    return made


def start(base: BaseModel, name: str | None = "ngram", slots: int = 4) -> LatencyTable:
    state = BatchState(base, AdversarialDrafter(0, nodes=6), slots, 96, StageTimes())
    return step_costs(DeviceStep(base, ExactVerifier(), state, packs=False), None, name)


def test_a_second_start_measures_nothing(tiny_base: BaseModel, machine: Machine) -> None:
    first = start(tiny_base)
    assert first.sure
    assert_equal(start(tiny_base), replace(first, sure=False))
    assert machine.measured == 1
    start(tiny_base, slots=5)
    start(tiny_base, "ngram+memory")
    start(tiny_base, None)
    assert machine.measured == 4


def test_starts_beside_load_correct_what_was_measured_without(tiny_base: BaseModel, machine: Machine) -> None:
    first = start(tiny_base, slots=256)
    for plain, full in [(1.25, 1.0), (1.0, 2.5), (6.0, 3.0), (0.75, 0.75), (2.0, 0.75)]:
        machine.seconds = SAMPLES[0] * plain, SAMPLES[1] * full
        found = start(tiny_base, slots=256)
        np.testing.assert_allclose(found.verify[0], machine.seconds)
        np.testing.assert_allclose(found.verify[1, -1], 2 * machine.seconds[1])
        assert_equal(replace(found, verify=first.verify, sure=True), first)
    assert machine.measured == 1


def test_what_was_measured_while_others_used_the_machine_is_measured_again(
    tiny_base: BaseModel, machine: Machine
) -> None:
    machine.busy = 0.5
    assert not start(tiny_base).sure
    assert not start(tiny_base).sure
    assert machine.measured == 1
    machine.busy = 0.02
    assert start(tiny_base).sure
    assert machine.measured == 2
    machine.busy = 0.5
    assert not start(tiny_base).sure
    assert machine.measured == 2


def test_what_was_measured_beside_load_is_measured_again_without(tiny_base: BaseModel, machine: Machine) -> None:
    machine.seconds = 3 * SAMPLES[0], 3 * SAMPLES[1]
    start(tiny_base)
    machine.seconds = SAMPLES
    assert_equal(start(tiny_base), machine.measure())
    machine.measured = 0
    machine.seconds = 3 * SAMPLES[0], 3 * SAMPLES[1]
    start(tiny_base)
    assert machine.measured == 0

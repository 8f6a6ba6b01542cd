"""What steps take on a device that works behind the host's back, by events on its clock: a budget is told that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from drafter import devices
from drafter.budget.contract import FixedBudget, StepObservation
from drafter.devices import DeviceTimer
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.step import DeviceStep
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import AdversarialDrafter, SpellingTokenizer
from tests.support.tapes import queue_steps


@dataclass
class DeviceClock:
    """Milliseconds that the device has worked, and those of each stage."""

    now: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"draft": 1.0, "verify": 10.0, "finish": 100.0})
    timed: int = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    made = DeviceClock()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = made.now

        def elapsed_time(self, end: Event) -> float:
            made.timed += 1
            return end.at - self.at

    def spending(stage: str):  # type: ignore[no-untyped-def]
        own = getattr(DeviceStep, stage)

        def run(*args: object, **given: object) -> object:
            made.now += made.stages[stage]
            return own(*args, **given)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(devices, "device_timer", DeviceTimer)
    for stage in made.stages:
        monkeypatch.setattr(DeviceStep, stage, spending(stage))
    return made


class Watching(FixedBudget):
    def __init__(self) -> None:
        super().__init__(3)
        self.seen: list[StepObservation] = []

    def observe(self, step: StepObservation) -> None:
        self.seen.append(step)


def observed(base: BaseModel, *, graph_safe: bool = True, **sampling: int) -> list[StepObservation]:
    budget, drafter = Watching(), AdversarialDrafter(0, nodes=3)
    drafter.spec = replace(drafter.spec, graph_safe=graph_safe)
    config = EngineConfig(max_num_seqs=1, max_model_len=64)
    engine = Engine(base, drafter, SpellingTokenizer(), config, budget=budget)
    engine.submit(Request([5, 6, 7], SamplingParams(24, ignore_eos=True, **sampling)))  # type: ignore[arg-type]
    while not engine.idle:
        engine.step()
    return budget.seen


def test_each_part_is_timed_and_what_the_device_does_in_between_is_not(
    tiny_base: BaseModel, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be recorded, as on several GPUs, and so later steps take as long as the first."""
    queue_steps(monkeypatch)
    monkeypatch.setattr("drafter.engine.cuda_graph.CudaRecorder", lambda device: None)
    own = Engine._admit

    def admit(engine: Engine) -> None:
        clock.now += 5000.0
        own(engine)

    monkeypatch.setattr(Engine, "_admit", admit)
    found = observed(tiny_base, logprobs=1)
    seconds = [one.seconds for one in found if one.seconds is not None]
    assert len(seconds) == len(found) > 5
    for one in seconds:
        assert one.reading == 0.0
        assert one.drafting == pytest.approx(0.001)
        assert one.rest == pytest.approx(0.110)


def test_a_step_is_timed_once_all_of_its_parts_are_repeated(
    tiny_base: BaseModel, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = queue_steps(monkeypatch)
    found = observed(tiny_base)
    timed = [one for one in found if one.seconds is not None]
    assert 0 < len(timed) < len(found)
    assert recorder.repeated >= 3 * len(timed)
    assert {one.seconds.all for one in timed if one.seconds} == {0.0}  # a tape does not call what spends time here


def test_a_step_that_the_host_waits_for_is_timed_by_the_host(
    tiny_base: BaseModel, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_steps(monkeypatch)
    found = observed(tiny_base, graph_safe=False)
    timed = [one.seconds for one in found if one.seconds is not None]
    assert 0 < len(timed) < len(found)
    assert clock.timed == 0
    assert all(one.drafting > 0 and one.rest > 0 for one in timed)


def test_a_host_that_follows_has_its_own_clock(tiny_base: BaseModel) -> None:
    found = observed(tiny_base)
    assert all(one.seconds is not None and one.seconds.rest > 0 for one in found)
    assert devices.device_timer(torch.device("cpu")) is None

"""How many engines a stage asks for, and what becomes of those that no node has room for."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import ray
import ray.data

from pipeline.cluster.ray_cluster import ActorResources, quiet_ray_data
from pipeline.engines.engine_actor import EngineProcess, engine_stage
from tests.support.waiting import wait_until

ROOM = 2
"""Engines of a core each that the tests' Ray has room for."""
WANTED = 5


class Gate:
    """Holds calls until it is opened, and counts who came."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._came: set[str] = set()

    def wait(self, who: str) -> None:
        self._came.add(who)
        self._open.wait()

    def came(self) -> int:
        return len(self._came)

    def open(self) -> None:
        self._open.set()


class WaitingEngine(EngineProcess):
    """An engine whose calls wait at a gate."""

    def __init__(self, spec: Any, gate: Any) -> None:
        self._gate = gate

    def __call__(self, block: pa.Table) -> pa.Table:
        ray.get(self._gate.wait.remote(ray.get_runtime_context().get_actor_id()))
        return block


def engines() -> Counter[str]:
    """States of the engines' actors."""
    actors = ray._private.state.actors().values()
    return Counter(one["State"] for one in actors if WaitingEngine.__name__ in one["ActorClassName"])


def test_all_engines_are_asked_for_at_once_and_a_job_goes_without_those_that_never_come(local_ray: None) -> None:
    """Ray starts nodes for actors that wait. The first that run take all work, and the others are given up."""
    quiet_ray_data()
    gate = ray.remote(num_cpus=0, max_concurrency=100)(Gate).remote()
    spec = SimpleNamespace(config=SimpleNamespace(max_num_seqs=1))
    dataset = ray.data.range(40, override_num_blocks=40).materialize()  # its tasks would want a core, too
    resources = ActorResources(0.75, 0.0, 1, WANTED)
    stage = engine_stage(
        dataset, WaitingEngine, {"spec": spec, "gate": gate}, (1, WANTED), resources, rows=1, at_start=WANTED
    )
    before = engines()
    rows: list[int] = []
    running = threading.Thread(target=lambda: rows.append(stage.materialize().count()))
    running.start()
    try:
        wait_until(lambda: ray.get(gate.came.remote()) == ROOM, "the engines that there is room for work")
        asked = engines() - before
    finally:
        ray.get(gate.open.remote())
        running.join()
    assert asked["ALIVE"] == ROOM
    assert sum(asked.values()) == WANTED, asked
    assert rows == [40]
    wait_until(lambda: (engines() - before).keys() <= {"DEAD"}, "every engine is given back")

"""Capture: whether the parts of steps of every drafter and mode become CUDA graphs, and do what they did before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from benchmarks.gpu.identity import drafters, loaded
from benchmarks.gpu.operators import as_on_a_gpu
from drafter.acceptance.contract import ExactVerifier
from drafter.devices import is_asynchronous, synchronise
from drafter.drafters.contract import Drafter
from drafter.engine.batch import BatchState
from drafter.engine.cuda_graph import CudaRecorder, PartGraphs
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import DeviceStep, StepTensors
from drafter.engine.warm_up import generate_texts
from drafter.requests import SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel

MODES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "min-p": SamplingParams(temperature=0.8, min_p=0.05),
    "penalised": SamplingParams(repetition_penalty=1.2, presence_penalty=0.3),
    "biased": SamplingParams(temperature=0.8, logit_bias={5: 2.0}),
}
_ROWS, _NODES, _LENGTH = 4, 15, 512


def cells(plan: Plan) -> list[Key]:
    """All combinations."""
    modes = ["greedy", "top-k and top-p"] if plan.tiny else list(MODES)
    return [{"drafter": name, "mode": mode} for name in drafters(plan) for mode in modes]


def prepare(plan: Plan) -> Measure:
    """See `Stage`. Without a GPU steps are done as there, and repeated by being done again."""
    base = load_base(plan.model)
    base.allow_packing()
    length = 64 if plan.tiny else _LENGTH

    def measure(cell: Key) -> Values:
        recorder = CudaRecorder(base.device) if is_asynchronous(base.device) and len(base.devices) == 1 else None
        with as_on_a_gpu():
            return captured(base, loaded(cell["drafter"], base, _NODES), MODES[cell["mode"]], length, recorder)

    return measure


@torch.inference_mode()
def captured(
    base: BaseModel, drafter: Drafter, sampling: SamplingParams, length: int, recorder: CudaRecorder | None
) -> Values:
    """Do the same step as it is and, on a GPU, as graphs; compare what they report, and time both."""
    safe = drafter.spec.graph_safe
    state = BatchState(base, drafter, _ROWS, length, StageTimes())
    step = DeviceStep(base, ExactVerifier(), state, packs=False)
    generate_texts(step)
    committed = int(state.lengths.max())
    for slot in range(_ROWS):
        state.sampling.set(slot, sampling, 1)
    state.expect([sampling] * _ROWS)
    nodes = min(_NODES, drafter.spec.max_nodes)
    as_it_is, recorded = (partial(QueuedStep(step, one).whole, _ROWS, nodes, committed) for one in (None, recorder))

    def again(do: Callable[[], StepTensors]) -> tuple[Tensor, float]:
        """What a step reports that begins where the first one did, and its seconds."""
        state.lengths.fill_(committed)
        if nodes:
            drafter.prepare(state.context([committed] * _ROWS))
        synchronise(base.device)
        start = time.perf_counter()
        outcome = do()
        synchronise(base.device)
        return outcome.packed.clone(), time.perf_counter() - start

    again(as_it_is)
    expected, eager_seconds = again(as_it_is)
    with _warnings_of(PartGraphs) as warnings:
        before = _taken(base.device)
        runs = [again(recorded) for _ in range(4)]
    waits = "no GPU" if recorder is None else "; ".join(warnings)
    return {
        "recorded": not waits,
        "drafts": "as a graph" if safe else "on the host",
        "why not": waits,
        "the same": all(torch.equal(found, expected) for found, _ in runs),
        "eager ms": 1e3 * eager_seconds,
        "last ms": 1e3 * runs[-1][1],
        "MiB": (_taken(base.device) - before) / 2**20,
    }


@contextmanager
def _warnings_of(what: type) -> Iterator[list[str]]:
    """What the module of a class warns of in a `with` block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(what.__module__)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _taken(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    numbers = {name: f"{values[name]:.2f}" for name in ("eager ms", "last ms", "MiB")}
    return {**cell, **values, **numbers}


STAGE = Stage(
    "capture",
    "Steps of 4 rows as CUDA graphs, and whether they report what they did before.",
    cells,
    prepare,
    row,
    first=lambda cell: cell["mode"] in ("greedy", "top-k and top-p"),
)

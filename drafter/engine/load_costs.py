"""What longer texts, and tokens that are drawn, add to the latencies that steps are planned by: measured at start.

Steps are timed on short texts whose tokens are the likeliest ones. What attention to a longer text costs is timed with
one row, and what a choice costs with as many rows as steps are timed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from drafter import devices
from drafter.budget.contract import Choosing, Floats
from drafter.budget.latency_table import LatencyTable
from drafter.engine.batch_state import BatchState
from drafter.engine.steps.cuda_graphs import StepGraphs
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.graph_step import step_shape, whole_step
from drafter.requests import SamplingParams
from drafter.tree.token_tree import bare_trees, root_only

_FAR = 4096
"""Committed tokens of a long text, where there is room for so many."""
_RUNS = 3
"""How often a step is timed. The least time counts."""
_SAMPLED: dict[Choosing, SamplingParams] = {
    "drawn": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.95),
}


def with_load_costs(step: DeviceStep, graphs: StepGraphs | None, table: LatencyTable, length: int) -> LatencyTable:
    """Return the table with what longer texts and drawn tokens add.

    Args:
        step: The stages; slots have texts of `length` tokens, and are changed.
        graphs: Where steps are queued as a whole.
        table: Latencies of steps over these texts.
        length: Of the texts.
    """
    longer = _longer(step, graphs, table, length)
    step.state.lengths.fill_(length)
    return replace(
        table,
        length=length,
        longer=longer,
        choosing=_choosing(step, graphs, table, length),
        choices=_choices(step, table),
    )


def _longer(step: DeviceStep, graphs: StepGraphs | None, table: LatencyTable, length: int) -> Floats:
    """Seconds `[M]` that one more token of a row's text costs a step with each number of nodes.

    Where steps are queued as a whole, drafting follows its own memory of the text. There a plain step is timed, which
    reads as many keys and values as one with a tree.
    """
    state, nodes = step.state, np.array(table.nodes)
    far = min(_FAR, state.max_length)
    if far <= length or not state.reserve(0, far + 1):
        return np.zeros(len(nodes))
    sizes = [0, table.nodes[-1]] if graphs is None else [0]
    costs = []
    for size in sizes:
        near, at_far = (
            _least_seconds(step, graphs, partial(_forward, step, graphs, size, one)) for one in (length, far)
        )
        costs.append(max(at_far - near, 0.0) / (far - length))
    found: Floats = np.interp(nodes, sizes, costs)
    return found


def _choosing(step: DeviceStep, graphs: StepGraphs | None, table: LatencyTable, length: int) -> dict[Choosing, Floats]:
    """Seconds `[K]` in which each way chooses one token of each row, beyond those of the likeliest one."""
    ways: dict[Choosing, SamplingParams] = {"greedy": SamplingParams(), **_SAMPLED}
    seconds: dict[Choosing, list[float]] = {way: [] for way in ways}
    for rows in map(int, table.batches):
        choice = _choice(step, graphs, rows, length)
        for way, params in ways.items():
            _sample(step.state, params, rows)
            seconds[way].append(_least_seconds(step, graphs, choice))
    _sample(step.state, SamplingParams(), step.state.slots)
    return {way: np.maximum(np.subtract(seconds[way], seconds["greedy"]), 0.0) for way in _SAMPLED}


def _choices(step: DeviceStep, table: LatencyTable) -> Floats | None:
    """Tokens `[M]` that a step chooses of each row; see `LatencyTable`."""
    nodes = np.array(table.nodes, dtype=np.float64)
    if not step.verifier.lossless:
        return 1 + nodes  # it asks at each of them
    if devices.is_asynchronous(step.base.device):
        return 1 + np.minimum(nodes, step.state.drafter.spec.max_depth)
    return None


def _choice(step: DeviceStep, graphs: StepGraphs | None, rows: int, length: int) -> Callable[[], object]:
    """A part of a plain step that ends with the choice of a token for each row, in the way that slots are sampled."""
    state = step.state
    if graphs is not None:
        return partial(_forward, step, graphs, 0, length, rows)
    verified = step.verify(root_only(state.tokens[:rows, 0]), length + 1)
    return lambda: step.verifier.accept(verified, state.row_sampling(slice(0, rows)))


def _sample(state: BatchState, params: SamplingParams, rows: int) -> None:
    for slot in range(rows):
        state.sampling.set(slot, params, 1)
    state.expect([params] * rows)


def _forward(step: DeviceStep, graphs: StepGraphs | None, nodes: int, length: int, rows: int = 1) -> None:
    """A forward of some rows over `length` tokens and `nodes` more; a whole plain step where there are graphs."""
    state = step.state
    state.lengths.fill_(length)
    if graphs is None:
        step.verify(bare_trees(state.tokens[:rows, 0], 1 + nodes), length + 1 + nodes)
    else:
        shape = step_shape(step, rows, nodes, length)
        graphs.run(shape, partial(whole_step, step, shape))


def _least_seconds(step: DeviceStep, graphs: StepGraphs | None, work: Callable[[], object]) -> float:
    """Seconds of a piece of work, at best, once whatever is done the first time is done, and a graph is recorded."""
    for _ in range(1 if graphs is None else 3):
        work()
    return min(devices.timed(step.base.device, work)[1] for _ in range(_RUNS))

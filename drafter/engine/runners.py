"""Two ways to run a step: the host follows its stages on a CPU, or queues all of it as a CUDA graph on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from drafter import devices
from drafter.budget.contract import Budget, StepSeconds
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.cuda_graph import StepGraphs, StepShape, coarse_length, padded_length, padded_rows
from drafter.engine.step import DeviceStep, Step, StepOutcome
from drafter.statistics import StageTimes


class EagerStep:
    """Runs steps stage by stage.

    Args:
        device_step: The stages.
        budget: Decides how much to draft.
        times: Where each stage's time is noted.
        admit: Lets sequences enter that have come since. Half of a step is over when its trees are there, and who comes
            then need not wait for the other half.
    """

    lag = 0

    def __init__(self, device_step: DeviceStep, budget: Budget, times: StageTimes, admit: Callable[[], object]) -> None:
        self._step, self._budget, self._times, self._admit = device_step, budget, times, admit
        self._timed = not devices.is_asynchronous(device_step.base.device)

    def run(self, context: DraftContext, plain: list[bool]) -> Step:
        """Decode one step of the context's rows; nothing is verified of the trees of `plain` ones."""
        started, reading, drafting = time.perf_counter(), 0.0, 0.0
        state, times = self._step.state, self._times
        load = state.load(context.host_lengths)
        ask = self._budget.plan(load)
        times.mark("host")
        promised = None
        if ask.nodes:
            begun = time.perf_counter()
            state.drafter.select(ask.member)
            state.drafter.prepare(context)
            reading = time.perf_counter() - begun
            times.mark("draft")
        tree = self._step.draft(context, ask)
        if ask.nodes:
            promised = tree.log_probs[:, 1:].cpu().numpy().astype(np.float64)
            times.mark("tree")
            sizes = np.where(plain, 0, (promised > -np.inf).sum(1))  # padding would be verified, too
            tree = tree.trimmed(1 + torch.from_numpy(sizes))
            times.mark("host")
            drafting = time.perf_counter() - started - reading
            self._admit()
        started = time.perf_counter()
        verified = self._step.verify(tree, context.longest + tree.size)
        times.mark("verify")
        outcome = self._step.accept(verified, slice(0, len(context.host_lengths)))
        times.mark("commit")
        seconds = StepSeconds(reading, drafting, time.perf_counter() - started) if self._timed else None
        return Step(load, ask, outcome, verified.depth, promised, seconds)


# ---- A step that is queued as a whole, as a CUDA graph of its shape; its outcome is read while the next one runs.


class GraphStep:
    """Queues steps.

    Args:
        device_step: The stages.
        graphs: Records and repeats them.
        budget: Decides how much to draft; all of it is verified.
        times: Where the host's time is noted.
    """

    lag = 1

    def __init__(self, device_step: DeviceStep, graphs: StepGraphs, budget: Budget, times: StageTimes) -> None:
        self._step, self._graphs, self._budget, self._times = device_step, graphs, budget, times

    def run(self, context: DraftContext, plain: list[bool]) -> Step:
        """Queue one step of the context's rows, without drafts if one of them is `plain`."""
        load = self._step.state.load(context.host_lengths)
        ask = Ask(0) if any(plain) else self._budget.plan(load)
        self._times.mark("host")
        if ask.nodes:
            self._step.state.drafter.prepare(context)
            self._times.mark("draft")
        shape = step_shape(self._step, len(context.host_lengths), ask.nodes, context.longest)
        whole = partial(whole_step, self._step, shape)
        # How many rows want how many log-probabilities is not part of a shape.
        outcome = whole() if self._step.state.logprobs else self._graphs.run(shape, whole)
        self._times.mark("verify")
        return Step(load, ask, outcome, min(ask.nodes, self._step.state.drafter.spec.max_depth))


def step_shape(step: DeviceStep, rows: int, nodes: int, longest: int) -> StepShape:
    """The shape of a step of `rows` rows, none of which is longer than `longest`, with so many draft nodes each."""
    state = step.state
    kv_length = padded_length(min(longest, state.max_length) + nodes + 1, state.capacity)
    if step.base.reads_to_length and state.cache.in_order:
        # Then only a drafter's work may follow from the length, and is little: that is no reason for many graphs.
        bounded = bool(nodes) and state.drafter.spec.bounded
        kv_length = coarse_length(kv_length, state.capacity) if bounded else state.capacity
    biases = state.sampling.biases.shape[1] if state.mode.biased else 0
    return StepShape(padded_rows(rows, state.slots), nodes, kv_length, state.mode, biases)


def whole_step(step: DeviceStep, shape: StepShape) -> StepOutcome:
    """A step without the host: all that it does follows from `shape` and from what is in the buffers."""
    state = step.state
    context = state.bounded_context(shape.rows, shape.kv_length - shape.nodes - 1)
    tree = step.draft(context, Ask(shape.nodes))
    outcome = step.accept(step.verify(tree, shape.kv_length), slice(0, shape.rows))
    state.lengths.clamp_(max=state.max_length)  # empty slots stay full
    return outcome

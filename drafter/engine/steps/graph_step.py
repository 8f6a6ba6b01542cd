"""A step that is queued as a whole, as a CUDA graph of its shape; its outcome is read while the next one runs."""

from __future__ import annotations

from functools import partial

from drafter.budget.contract import Budget
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.steps.cuda_graphs import StepGraphs, StepShape, coarse_length, padded_length, padded_rows
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.eager_step import StepRun
from drafter.engine.steps.outcome import StepOutcome
from drafter.stage_times import StageTimes


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

    def run(self, context: DraftContext, plain: list[bool]) -> StepRun:
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
        return StepRun(outcome, load, ask.nodes, ask.nodes)


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

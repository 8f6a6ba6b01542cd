"""What an engine does before its first request: compile the base, and measure what steps cost on this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from drafter.budget.contract import Floats
from drafter.budget.latency_table import NODE_COUNTS, LatencyTable, batch_sizes, measure_latency
from drafter.devices import timed
from drafter.drafters.contract import Ask
from drafter.engine.batch_state import BatchState
from drafter.engine.load_costs import with_load_costs
from drafter.engine.sequences.prefill import read_prompts
from drafter.engine.steps.cuda_graphs import StepGraphs
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.graph_step import step_shape, whole_step
from drafter.errors import LoadError
from drafter.tree.token_tree import bare_trees, root_only

_PROBED_LENGTH = 256
"""Committed tokens of the sequences whose steps are timed."""
_DRAFT_RUNS = 2
"""How often a draft is timed: the first run may do what only a first run must."""
_PROBED_TEXT, _PROBED_TEXTS = 24, 16
"""How many of these the base generates itself, in how many different texts."""


@torch.inference_mode()
def compile_base(step: DeviceStep) -> None:
    """Compile the base's forward, and call it once for each of the shapes that compilers tell apart.

    These are one row and several, one node and several. A compiler takes sizes that happen to be equal to be equal
    always, so none of them are.

    Raises:
        LoadError: The base cannot be compiled.
    """
    state, base = step.state, step.base
    length, size = state.max_length // 2, state.drafter.spec.max_nodes + 1
    base.compile()
    state.lengths.fill_(length)
    many = max(state.slots - 1, min(state.slots, 2))
    several = size + 1 if size == many else size
    try:
        for rows in sorted({1, many}):
            for nodes in (1, several) if size > 1 else (1,):
                tree = bare_trees(torch.zeros(rows, dtype=torch.long, device=base.device), nodes)
                kv_length = length + nodes
                step.verify(tree, kv_length + (kv_length == rows * nodes))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's faults are of many kinds, and not all are wrapped as its own
        reason = " ".join(str(error).strip().split("\n")[:2])
        raise LoadError(
            f"{base.name} cannot be compiled here: {type(error).__name__}: {reason} (leave compile out)"
        ) from error
    state.forget()


@torch.inference_mode()
def measure_steps(step: DeviceStep, graphs: StepGraphs | None) -> list[LatencyTable]:
    """Latencies of steps of up to all slots and up to the drafter's largest trees, by which of its members drafts.

    There is one table where the drafter is one, and where steps are queued as a whole, which always have the same
    drafter. Verification takes as long whoever has drafted, so it is timed once.

    Args:
        step: The stages; all slots are empty.
        graphs: Where steps are queued as a whole; all of a step is verification there.

    Raises:
        LoadError: The largest step does not fit into the memory.
    """
    state, most = step.state, step.state.drafter.spec.max_nodes
    counts = sorted({count for count in NODE_COUNTS if count < most} | {most})
    others = range(1, len(state.drafter.members)) if graphs is None else ()
    try:
        generate_texts(step)
        depth = state.drafter.spec.max_depth
        table = measure_latency(partial(_probe, step, graphs), batch_sizes(state.slots), counts, depth)
        table = with_load_costs(step, graphs, table, _probed_length(state))
        tables = [table, *(replace(table, draft=_measure_drafts(step, table, member)) for member in others)]
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{state.slots} slots with trees of {most} nodes do not fit into the memory beside {step.base.name}: "
            "lower slots or nodes"
        ) from error
    state.drafter.select(0)
    state.forget()
    return tables


def _measure_drafts(step: DeviceStep, table: LatencyTable, member: int) -> Floats:
    """Seconds `[K, M]` in which a member drafts each of the table's shapes over the generated texts."""
    state, length, draft = step.state, _probed_length(step.state), np.zeros_like(table.draft)
    state.drafter.select(member)
    state.lengths.fill_(length)
    for place, rows in enumerate(int(batch) for batch in table.batches):
        context = state.context([length] * rows)
        most = (1 + state.drafter.spec.max_depth) * table.verify[place, 0]
        for column, nodes in enumerate(table.nodes[1:], start=1):
            if draft[place, column - 1] > most:  # it cannot pay, and neither can more
                draft[place, column:] = draft[place, column - 1]
                break
            work = partial(step.draft, context, Ask(nodes, 1 / (nodes + 1), member))
            state.drafter.prepare(context)
            draft[place, column] = min(timed(step.base.device, work)[1] for _ in range(_DRAFT_RUNS))
    return draft


def _probed_length(state: BatchState) -> int:
    return min(_PROBED_LENGTH, state.max_length // 2)


@torch.inference_mode()
def generate_texts(step: DeviceStep) -> None:
    """Fill all slots with texts that go on in the base's own words: searches cost more where much is likely."""
    state, base = step.state, step.base
    length = _probed_length(state)
    count, start = min(state.slots, _PROBED_TEXTS), max(length - _PROBED_TEXT, 0)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(base.vocab_size, (start + count,), generator=random).to(base.device)
    for slot in range(state.slots):
        state.reserve(slot, length + 1)  # where memory does not reach for all, the others' steps take as long
    state.tokens[0, :start] = prompt[:start]
    for slot in range(state.slots):
        state.drafter.enter(slot, prompt[:start].cpu().numpy())
    read_prompts(base, state, 0, [slice(0, start)])
    for slot in range(1, count):
        state.copy(0, slot, start)
    state.tokens[:count, start] = prompt[start:]
    state.lengths[:count] = start
    for end in range(start + 1, length + 1):
        step.accept(step.verify(root_only(state.tokens[:count, end - 1]), end), slice(0, count))
    for slot in range(count, state.slots):
        state.copy(slot % count, slot, length + 1)  # the pending token, too


def _probe(step: DeviceStep, graphs: StepGraphs | None, rows: int, nodes: int) -> tuple[float, float]:
    """Seconds of drafting in a step of `rows` rows over the generated texts, and of the rest of it."""
    state, device = step.state, step.base.device
    length = _probed_length(state)
    state.lengths.fill_(length)
    context, ask = state.context([length] * rows), Ask(nodes, 1 / (nodes + 1))
    if nodes:
        state.drafter.prepare(context)
    if graphs is not None:
        shape = step_shape(step, rows, nodes, length)
        whole = partial(whole_step, step, shape)
        graphs.warm_up(shape, whole)
        state.lengths.fill_(length)
        return 0.0, timed(device, lambda: graphs.run(shape, whole))[1]
    tree, drafting = timed(device, lambda: step.draft(context, ask))
    tree = replace(tree, tokens=tree.tokens.clamp_min(0))  # padding would be verified for less
    return drafting if nodes else 0.0, timed(device, lambda: step.verify(tree, length + tree.size))[1]

"""Work before the first request: tries the largest step, compiles the model, and measures latencies of steps."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import Budget, FixedBudget, Floats
from drafter.budget.latency_table import NODE_COUNTS, LatencyTable, batch_sizes, load_costs, measure_latency, save_costs
from drafter.devices import timed
from drafter.drafters.contract import Ask, choices_of
from drafter.engine.batch import BatchState
from drafter.engine.memory import MemoryPlan
from drafter.engine.queued_step import QueuedStep, padded_rows
from drafter.engine.step import DeviceStep
from drafter.errors import LoadError
from drafter.native.build import processor
from drafter.source_commit import VERSION, source_commit
from drafter.tree.token_tree import bare_trees, root_only

_DEAREST = SamplingMode(*[True] * len(fields(SamplingMode)))
"""All sampling operations."""


@torch.inference_mode()
def try_dearest_step(step: DeviceStep, queue: QueuedStep, plan: MemoryPlan) -> None:
    """Do the step that takes most memory: all slots at full length, the largest trees, and all sampling operations.

    Args:
        step: The stages; all slots are empty, before and after.
        plan: For the message.

    Raises:
        LoadError: It does not fit.
    """
    state, nodes = step.state, step.state.drafter.spec.max_nodes
    mode, state.mode = state.mode, _DEAREST
    try:
        state.lengths.fill_(0)
        _prepare(state, state.slots, nodes, 0)
        queue.whole(state.slots, nodes, state.max_length)
        devices.synchronise(step.base.device)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"a step of {state.slots:,} slots that samples with every setting does not fit beside {step.base.name}: "
            f"lower max_num_seqs, max_model_len or num_draft_tokens (planned: {plan})"
        ) from error
    finally:
        state.mode = mode
    state.forget()


@torch.inference_mode()
def record_steps(queue: QueuedStep, nodes: int) -> None:
    """Record plain steps and those of `nodes` draft tokens, of all numbers of rows, so that no request waits for it.

    The largest come first: smaller ones then find room in what these have left of the graphs' memory.

    Args:
        queue: All slots are empty, before and after.

    Raises:
        LoadError: They do not fit into the memory.
    """
    state = queue.state
    length = _probed_length(state)
    sizes = {padded_rows(rows, state.slots) for rows in range(1, state.slots + 1)}
    try:
        for rows, count in sorted(product(sizes, {0, nodes}), reverse=True):
            for _ in range(_UNTIL_RECORDED):
                state.lengths.fill_(0)
                _prepare(state, rows, count, 0)
                queue.whole(rows, count, length)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"the CUDA graphs of steps of {state.slots:,} slots do not fit into the memory: lower max_num_seqs or "
            "num_draft_tokens"
        ) from error
    state.forget()


def _prepare(state: BatchState, rows: int, nodes: int, length: int) -> None:
    if nodes:
        state.drafter.prepare(state.context([length] * rows))


_UNTIL_RECORDED = 3
"""Runs of a step after which it is repeated, or will never be."""
_PROBED_LENGTH = 256
"""Committed tokens of the sequences whose steps are timed."""
_DRAFT_RUNS = 2
"""Timed runs of a draft: the first run includes one-time work."""
_SAMPLE_RUNS = 9
"""Times that each of two steps is sampled. The least time counts."""
_FASTER = 1.5
"""A machine that is so many times as fast as when latencies were measured was busy then, and measures them again."""
_BUSY = 0.1
"""Share of the processors that others may have while latencies are measured. With more, the ratios are theirs."""
_PROBED_TEXT, _PROBED_TEXTS = 24, 16
"""Tokens of a probed text that the target model generates itself, and number of different texts."""


@torch.inference_mode()
def compile_base(step: DeviceStep) -> None:
    """Compile the model's forward for one row and several, one node and several.

    Raises:
        LoadError: It cannot be compiled.
    """
    # A compiler takes sizes that happen to be equal to be equal always, so none of them are.
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
def make_budget(
    step: DeviceStep, queue: QueuedStep | None, nodes: int | Literal["auto"], drafter: str | None
) -> Budget:
    """Return the budget of a number of draft tokens, `auto` by `step_costs`, with the steps of a `queue` recorded."""
    drafts, choices = step.state.drafter, choices_of(step.state.drafter)
    most = drafts.spec.max_nodes if nodes == "auto" else min(nodes, drafts.spec.max_nodes)
    if queue is not None:
        record_steps(queue, most)
    if nodes != "auto" or not most:
        return FixedBudget(most)
    return AdaptiveBudget(
        step_costs(step, queue, drafter),
        list(choices),
        withheld=[place for place, one in enumerate(choices.values()) if not one.drafts],
        known=[one.worth for one in choices.values()],
        shadows=step.verifier.lossless and queue is None,
    )


def step_costs(step: DeviceStep, queue: QueuedStep | None, drafter: str | None) -> LatencyTable:
    """Return the table of `measure_steps`; if it was measured here before, that of the cache folder, corrected.

    A table that was measured while others used the machine is measured again once they do not.

    Args:
        drafter: Name of the drafter, for the cache; None does without. Steps that are queued are measured at each
            start, because that also records them.
    """
    if drafter is None or queue is not None:
        return measure_steps(step, queue)
    subject = _subject(step, drafter)
    others = devices.watch_others()
    if (kept := load_costs(subject)) is not None:
        table, then = kept
        # A machine that others share is faster at one time than at another, and its memory more so than its processor.
        # While it is slow, whatever is measured is of the others, too: what is known from a better time is corrected.
        plain, full = (now / before for now, before in zip(_samples(step), then, strict=True))
        if min(plain, full) > 1 / _FASTER and (table.sure or others() > _BUSY):
            return replace(table.changed(plain, full), sure=False)
    others = devices.watch_others()
    table = measure_steps(step, queue)
    table = replace(table, sure=others() <= _BUSY)
    save_costs(subject, table, _samples(step))
    return table


def _subject(step: DeviceStep, drafter: str) -> dict[str, Any]:
    base, state = step.base, step.state
    return {
        "machine": [processor(), torch.get_num_threads(), str(base.device)],
        "versions": [torch.__version__, VERSION, source_commit()],
        "model": [base.fingerprint, str(base.dtype), base.executor_name, step.packs],
        "drafter": [drafter, asdict(state.drafter.spec), list(state.drafter.members)],
        "verifier": step.verifier.name,
        "state": [state.slots, state.max_length, state.cache.blocks.in_order],
    }


def _samples(step: DeviceStep) -> tuple[float, float]:
    """Return the seconds of a plain step of one row, which memory decides, and of one with the largest tree."""
    # Of one row: many rows read much of the KV cache, and where nothing was written yet, that is faster than later.
    state, length, most = step.state, _probed_length(step.state), step.state.drafter.spec.max_nodes
    state.reserve(0, length + 1)
    works = [partial(_verify, step, nodes, length) for nodes in (0, most)]
    for work in works:
        work()
    # In turn: what else runs on the machine had better not meet one of them alone.
    rounds = [[devices.timed(step.base.device, work)[1] for work in works] for _ in range(_SAMPLE_RUNS)]
    state.forget()
    plain, full = map(min, zip(*rounds, strict=True))
    return plain, full


def _verify(step: DeviceStep, nodes: int, length: int) -> None:
    step.state.lengths.fill_(length)
    step.verify(bare_trees(step.state.tokens[:1, 0], 1 + nodes), length + 1 + nodes)


@torch.inference_mode()
def measure_steps(step: DeviceStep, queue: QueuedStep | None) -> LatencyTable:
    """Measure latencies of steps up to all slots and the drafter's largest trees, and of each member's drafting.

    Verification is timed once: it does not depend on the drafter. Where steps are queued it includes the choice.

    Args:
        step: The stages; all slots are empty.

    Raises:
        LoadError: The largest step does not fit into the memory.
    """
    state, most = step.state, step.state.drafter.spec.max_nodes
    # Steps are queued on a GPU, which verifies three draft tokens as fast as one.
    few = () if queue is None else (1, 2)
    counts = sorted({count for count in NODE_COUNTS if count < most and count not in few} | {most})
    others = range(1, len(step.choices))
    try:
        generate_texts(step)
        depth = state.drafter.spec.max_depth
        table = measure_latency(partial(_probe, step, queue), batch_sizes(state.slots), counts, depth)
        drafts = [table.draft[0], *(_measure_drafts(step, queue, table, member) for member in others)]
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{state.slots} slots with trees of {most} nodes do not fit into the memory beside {step.base.name}: "
            "lower max_num_seqs or num_draft_tokens"
        ) from error
    state.forget()
    return replace(table, draft=np.stack(drafts))


def _measure_drafts(step: DeviceStep, queue: QueuedStep | None, table: LatencyTable, member: int) -> Floats:
    state, length, draft = step.state, _probed_length(step.state), np.zeros_like(table.verify)
    runs = _DRAFT_RUNS if queue is None else _UNTIL_RECORDED + 1
    state.lengths.fill_(length)
    for place, rows in enumerate(int(batch) for batch in table.batches):
        context = state.context([length] * rows)
        most = (1 + state.drafter.spec.max_depth) * table.verify[place, 0]
        for column, nodes in enumerate(table.nodes[1:], start=1):
            if draft[place, column - 1] > most:  # it cannot pay, and neither can more
                draft[place, column:] = draft[place, column - 1]
                break
            work = partial((queue or step).draft, context, Ask(nodes, 1 / (nodes + 1), member))
            step.choices[member].prepare(context)
            draft[place, column] = min(timed(step.base.device, work)[1] for _ in range(runs))
    return draft


def _probed_length(state: BatchState) -> int:
    return min(_PROBED_LENGTH, state.max_length // 2)


@torch.inference_mode()
def generate_texts(step: DeviceStep) -> None:
    """Fill all slots with texts that the model continues itself: searches cost more where many tokens are likely."""
    state, base = step.state, step.base
    length = _probed_length(state)
    count, start = min(state.slots, _PROBED_TEXTS), max(length - _PROBED_TEXT, 0)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(base.vocab_size, (start + count,), generator=random).to(base.device)
    for slot in range(state.slots):
        state.reserve(slot, length + 1)  # with too little memory for all slots, the others' steps take as long
    state.tokens[0, :start] = prompt[:start]
    for slot in range(state.slots):
        state.reset_drafter(slot, prompt[:start].cpu().numpy())
    state.read(0, [slice(0, start)])
    for slot in range(1, count):
        state.copy(0, slot, start)
    state.tokens[:count, start] = prompt[start:]
    state.lengths[:count] = start
    for end in range(start + 1, length + 1):
        verified, rows = step.verify(root_only(state.tokens[:count, end - 1]), end), slice(0, count)
        step.finish(verified, rows)
    for slot in range(count, state.slots):
        state.copy(slot % count, slot, length + 1)  # the pending token, too


def _probe(step: DeviceStep, queue: QueuedStep | None, rows: int, nodes: int) -> tuple[float, float]:
    state, device = step.state, step.base.device
    length = _probed_length(state)
    state.lengths.fill_(length)
    context, ask = state.context([length] * rows), Ask(nodes, 1 / (nodes + 1))
    if nodes:
        state.drafter.prepare(context)
    if queue is not None:
        for _ in range(_UNTIL_RECORDED):
            queue.whole(rows, nodes, length)
            state.lengths.fill_(length)
        tree, drafting = timed(device, lambda: queue.draft(context, ask))
        verified = partial(queue.verify, tree, length + tree.size)
        return drafting, timed(device, lambda: queue.finish(verified(), slice(0, rows)))[1]
    tree, drafting = timed(device, lambda: step.draft(context, ask))
    tree = replace(tree, tokens=tree.tokens.clamp_min(0))  # padding would be verified for less
    return drafting if nodes else 0.0, timed(device, lambda: step.verify(tree, length + tree.size))[1]

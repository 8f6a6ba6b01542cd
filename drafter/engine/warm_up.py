"""Checks before the first request that an engine fits into its device's memory, and measures its latencies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.budget.contract import Choosing, Floats
from drafter.budget.latency_table import NODE_COUNTS, LatencyTable, batch_sizes, load_costs, measure_latency, save_costs
from drafter.devices import timed
from drafter.drafters.contract import Ask, DraftSpec
from drafter.engine.admission import GPU_CHUNK
from drafter.engine.batch import BatchState
from drafter.engine.config import EngineConfig
from drafter.engine.cuda_graph import StepGraphs
from drafter.engine.memory import EngineSizes, MemoryPlan, gib, plan_memory, what_would_fit
from drafter.engine.runners import step_shape, whole_step
from drafter.engine.scheduler import read_prompts
from drafter.engine.step import DeviceStep
from drafter.errors import LoadError
from drafter.native.build import processor
from drafter.requests import SamplingParams
from drafter.source_commit import source_commit
from drafter.target.attention import query_groups
from drafter.target.model import BaseModel
from drafter.tree.token_tree import bare_trees, root_only

_LOG = logging.getLogger(__name__)
_DEAREST = SamplingMode(biased=True, penalties=True, random=True, mixed=True, ranked=True, nucleus=True, floored=True)
"""All that sampling may have to do, in one batch."""


def engine_sizes(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> EngineSizes:
    """The sizes of an engine; see there.

    Args:
        base: The base, ready for decoding.
        spec: The drafter's.
        config: The engine's.
        max_length: Prompt and output tokens of a sequence.
        graphs: Steps that are recorded at most.
    """
    layers, width = base.kv_bytes_per_token, base.hidden_size
    return EngineSizes(
        slots=config.max_num_seqs,
        max_length=max_length,
        nodes=spec.max_nodes,
        depth=spec.max_depth,
        vocabulary=base.vocab_size,
        width=width,
        inner=getattr(base.config, "intermediate_size", None) or 4 * width,
        groups=query_groups(base.config),
        number=base.dtype.itemsize,
        kv=sum(layers),
        layer_kv=max(layers),
        copied_kv=max(base.copies_of_kv, int(config.kv_bytes is not None)),
        draft_kv=spec.bytes_per_token,
        hidden=len(spec.hidden_layers) * width * base.dtype.itemsize,
        prompt=min(GPU_CHUNK, config.max_num_seqs * max_length),
        in_parts=base.reads_to_length and config.kv_bytes is None,
        kv_limit=config.kv_bytes,
        graphs=graphs,
        scratch=spec.scratch,
    )


def plan_or_refuse(device: torch.device, sizes: EngineSizes) -> MemoryPlan:
    """Plan an engine's memory, and note the plan in the log.

    Raises:
        LoadError: The device has less memory left; the message says what takes how much, and what would fit.
    """
    plan, free = plan_memory(sizes), devices.free_bytes(device)
    _LOG.info(
        "memory beside the model, of %s left on %s:\n%s", "?" if free is None else gib(free), device, plan.table()
    )
    if free is not None and plan.total > free:
        raise LoadError(
            f"an engine of {sizes.slots:,} slots takes {gib(plan.total)} beside the model, and {device} has "
            f"{gib(free)} left: {what_would_fit(sizes, free)} (it takes {plan})"
        )
    return plan


@torch.inference_mode()
def try_dearest_step(step: DeviceStep, plan: MemoryPlan) -> None:
    """Do the step that takes most memory: all slots at full length, the largest trees, and all that sampling may do.

    Args:
        step: The stages; all slots are empty, and are so again.
        plan: What was thought that it takes.

    Raises:
        LoadError: It does not fit.
    """
    state, nodes = step.state, step.state.drafter.spec.max_nodes
    mode, state.mode = state.mode, _DEAREST
    try:
        state.lengths.fill_(0)
        if nodes:
            state.drafter.prepare(state.context([0] * state.slots))
        whole_step(step, step_shape(step, state.slots, nodes, state.max_length))
        devices.synchronise(step.base.device)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"a step of {state.slots:,} slots that samples with every setting does not fit beside {step.base.name}: "
            f"lower max_num_seqs, max_model_len or num_draft_tokens (planned: {plan})"
        ) from error
    finally:
        state.mode = mode
    state.forget()


# How context length and sampling add to a step's latency.

_FAR = 4096
"""Committed tokens of a long text, where there is room for so many."""
_RUNS = 3
"""Number of timed runs of a step. The least time counts."""
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


# Compilation, and latencies of steps.

_PROBED_LENGTH = 256
"""Committed tokens of the sequences whose steps are timed."""
_DRAFT_RUNS = 2
"""Number of timed runs of a draft: the first run includes one-time work."""
_ALIKE = 1.3
"""Ratio of two times of the same step that other work on the machine explains."""
_PROBED_TEXT, _PROBED_TEXTS = 24, 16
"""Tokens of these that the target model generates itself, and number of different texts."""


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
def step_costs(step: DeviceStep, graphs: StepGraphs | None, drafter: str | None) -> list[LatencyTable]:
    """Return what `measure_steps` does, from the cache folder if it was measured here before and is still true.

    Args:
        drafter: Name of the drafter, for the cache; None does without. Steps that are queued as a whole are measured at
            each start, because that also records them.
    """
    if drafter is None or graphs is not None:
        return measure_steps(step, graphs)
    subject = _subject(step, drafter)
    kept = load_costs(subject)
    if kept is not None and _still_true(step, kept[0]):
        return kept
    tables = measure_steps(step, graphs)
    save_costs(subject, tables)
    return tables


def _subject(step: DeviceStep, drafter: str) -> dict[str, Any]:
    """All that step times follow from."""
    base, state = step.base, step.state
    return {
        "machine": [processor(), torch.get_num_threads(), str(base.device)],
        "versions": [torch.__version__, metadata.version("drafter"), source_commit()],
        "model": [base.fingerprint, str(base.dtype), base.executor_name, step.packs],
        "drafter": [drafter, asdict(state.drafter.spec), list(state.drafter.members)],
        "verifier": step.verifier.name,
        "state": [state.slots, state.max_length, state.cache.nbytes],
    }


def _still_true(step: DeviceStep, table: LatencyTable) -> bool:
    """Return whether plain steps of one row and of all rows take about as long as in the table."""
    state, length = step.state, table.length
    for slot in range(state.slots):
        state.reserve(slot, length + 1)
    found = [_least_seconds(step, None, partial(_forward, step, None, 0, length, rows)) for rows in (1, state.slots)]
    state.forget()
    kept = [float(table.verify[place, 0]) for place in (0, -1)]
    return all(1 / _ALIKE < now / then < _ALIKE for now, then in zip(found, kept, strict=True))


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
            "lower max_num_seqs or num_draft_tokens"
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

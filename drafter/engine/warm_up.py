"""What an engine does before its first request: compile the base, and measure what steps cost here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from drafter.budget.adaptive import FixedBudget
from drafter.budget.cost_model import NODE_COUNTS, LatencyTable, batch_sizes, measure_latency
from drafter.devices import synchronise
from drafter.engine.batch_state import Rows
from drafter.engine.cuda_graphs import StepGraphs
from drafter.errors import LoadError
from drafter.tree.token_tree import TokenTree, root_only

T = TypeVar("T")

_PROBED_LENGTH = 256
"""Committed tokens of the rows whose steps are timed."""
_PROBED_TEXT, _PROBED_ROWS = 24, 16
"""How many of these the base says itself, in how many different ways."""


@torch.inference_mode()
def compile_base(rows: Rows) -> None:
    """Compile the base's forward, and call it once for each of the shapes that compilers tell apart.

    These are one row and several, one node and several. Sizes that happen to be equal would be taken to be so always,
    so none of them are.

    Raises:
        LoadError: The base cannot be compiled.
    """
    base, length, size = rows.base, rows.max_length // 2, rows.drafter.tree_size
    base.compile()
    rows.lengths.fill_(length)
    many = max(rows.slots - 1, min(rows.slots, 2))
    several = size + 1 if size == many else size
    try:
        for count in sorted({1, many}):
            for nodes in (1, several) if size > 1 else (1,):
                tree = root_only(torch.zeros(count, dtype=torch.long, device=base.device))
                tree = TokenTree(*(part.expand(count, nodes) for part in vars(tree).values()))
                kv_length = length + nodes
                rows.verify(tree, kv_length + (kv_length == count * nodes))
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).strip().split("\n")[:2])
        raise LoadError(f"{base.name} cannot be compiled here: {reason} (leave compile out)") from error
    rows.restore([])


@torch.inference_mode()
def measure_steps(rows: Rows, graphs: StepGraphs | None) -> LatencyTable:
    """Latencies of steps of up to all rows and up to the drafter's largest trees.

    Args:
        rows: All slots are empty.
        graphs: Where steps are queued as a whole; all of a step is verification there.

    Raises:
        LoadError: The largest step does not fit into the memory.
    """
    most = rows.drafter.tree_size - 1
    counts = sorted({count for count in NODE_COUNTS if count < most} | {most})
    try:
        say_something(rows)
        table = measure_latency(partial(_probe, rows, graphs), batch_sizes(rows.slots), counts)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{rows.slots} slots with trees of {most} nodes do not fit into the memory beside {rows.base.name}: "
            "lower slots or nodes"
        ) from error
    rows.restore([])
    return table


def _probed_length(rows: Rows) -> int:
    return min(_PROBED_LENGTH, rows.max_length // 2)


@torch.inference_mode()
def say_something(rows: Rows) -> None:
    """Fill all slots with a text that goes on in the base's own words: searches cost more where much is likely."""
    base, length = rows.base, _probed_length(rows)
    count, start = min(rows.slots, _PROBED_ROWS), max(length - _PROBED_TEXT, 0)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(base.vocab_size, (start + count,), generator=random).to(base.device)
    rows.tokens[0, :start] = prompt[:start]
    rows.prefill(0, [slice(0, start)])
    for row in range(1, count):
        rows.copy(0, row, start)
    rows.tokens[:count, start] = prompt[start:]
    rows.lengths[:count] = start
    for end in range(start + 1, length + 1):
        tree = root_only(rows.tokens[:count, end - 1])
        rows.commit(rows.verify(tree, end), slice(0, count))
    for row in range(count, rows.slots):
        rows.copy(row % count, row, length + 1)  # the pending token, too


def _probe(rows: Rows, graphs: StepGraphs | None, count: int, nodes: int) -> tuple[float, float]:
    """Seconds of drafting in a step of `count` rows over what was said, and of the rest of it."""
    length = _probed_length(rows)
    rows.lengths.fill_(length)
    context = rows.context([length] * count, least=FixedBudget(nodes).least)
    if nodes:
        rows.drafter.catch_up(context)
    if graphs is not None:
        shape = rows.shape(count, nodes, length)
        step = partial(rows.step, shape)
        graphs.warm_up(shape, step)
        rows.lengths.fill_(length)
        return 0.0, _timed(rows.base.device, lambda: graphs.run(shape, step))[1]
    tree, drafting = root_only(context.pending), 0.0
    if nodes:
        tree, drafting = _timed(rows.base.device, lambda: rows.drafter.propose(context, nodes + 1))
        tree = replace(tree, tokens=tree.tokens.clamp_min(0))  # padding would be verified for less
    return drafting, _timed(rows.base.device, lambda: rows.verify(tree, length + tree.size))[1]


def _timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds on the device."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start

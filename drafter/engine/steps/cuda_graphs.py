"""Whole steps as CUDA graphs: what the host decides about a step is its shape, and each shape is recorded once.

A step reads and writes buffers that are there for good, and what it reports is a few small tensors. So a step of a
shape is the same list of kernels each time, and to repeat it is one call instead of thousands.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from drafter import devices
from drafter.engine.steps.outcome import StepOutcome
from drafter.verifiers.choices import SamplingMode

_LOG = logging.getLogger(__name__)
_LEAST_KV = 64


@dataclass(frozen=True)
class StepShape:
    """What the host decides about a step. Steps of one shape run the same kernels on the same buffers.

    Args:
        rows: Slots `0..rows-1` are decoded; the last of them may be empty.
        nodes: Draft nodes of each row.
        kv_length: Cache positions that attention reads.
        mode: What sampling needs.
        biases: Most biased tokens of a row.
    """

    rows: int
    nodes: int
    kv_length: int
    mode: SamplingMode
    biases: int


Step = Callable[[], StepOutcome]
Record = Callable[[Step], Step]
"""Makes of a step one that repeats it: on the same buffers, reporting in the same tensors."""


class StepGraphs:
    """Steps by shape: the first of each is run as it is, the second is recorded, and then it is repeated.

    Args:
        record: Makes a step that can be repeated; None where none can.
    """

    _MOST = 256
    """Recorded steps that are kept; each takes memory."""

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self._seen: set[StepShape] = set()
        self._recorded: OrderedDict[StepShape, Step] = OrderedDict()
        self._refused: set[tuple[SamplingMode, bool]] = set()

    def run(self, shape: StepShape, step: Step) -> StepOutcome:
        """Do a step of this shape. Its report is only good until the next step, of whatever shape."""
        if shape not in self._recorded:
            if shape not in self._seen or not self._records(shape):
                self._seen.add(shape)  # what libraries put off until first needed must not be recorded
                return step()
            if not self._try_to_record(shape, step):
                return step()
        self._recorded.move_to_end(shape)
        return self._recorded[shape]()

    def warm_up(self, shape: StepShape, step: Step) -> None:
        """Do steps of this shape until the next one is repeated, or will never be."""
        for _ in range(2):
            if shape not in self._recorded:
                self.run(shape, step)

    def _records(self, shape: StepShape) -> bool:
        return self._record is not None and (shape.mode, shape.nodes > 0) not in self._refused

    def _try_to_record(self, shape: StepShape, step: Step) -> bool:
        assert self._record is not None
        try:
            self._recorded[shape] = self._record(step)
        except RuntimeError as error:
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            reason = str(first).strip().split("\n")[0]
            _LOG.warning("a step cannot be recorded as a CUDA graph and runs kernel by kernel: %s", reason)
            self._refused.add((shape.mode, shape.nodes > 0))
            return False
        if len(self._recorded) > self._MOST:
            self._recorded.popitem(last=False)
        return True


def step_graphs(device: torch.device, all_devices: Collection[torch.device], *, graph_safe: bool) -> StepGraphs | None:
    """Graphs for a base on `all_devices`, whose tokens come and go on `device`.

    None where the host follows each stage. Graphs of several devices, or of a drafter that is not `graph_safe`, cannot
    be recorded: steps are queued as wholes there, too, but run as they are each time.
    """
    if not devices.is_asynchronous(device):
        return None
    return StepGraphs(_recorder(device) if len(all_devices) == 1 and graph_safe else None)


_RECORDING = threading.Lock()
"""CUDA records for a whole process: two engines must not do it together."""


def _recorder(device: torch.device) -> Record:
    pool = None
    stream = torch.cuda.Stream(device)
    failed: list[torch.cuda.CUDAGraph] = []

    def record(step: Step) -> Step:
        nonlocal pool
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        # One pool for all: graphs are repeated one after another, and none reads what another left there. Reports keep
        # out of each other's way because they are held here.
        how: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        try:
            with _RECORDING, torch.cuda.device(device), torch.cuda.graph(graph, **how):
                report = step()
        except BaseException:
            torch.cuda.set_stream(before)
            failed.append(graph)  # the allocator may still ask it whether it is recording
            raise
        pool = graph.pool()

        def repeat() -> StepOutcome:
            graph.replay()
            return report

        return repeat

    return record


def _first(error: BaseException) -> BaseException:
    """What went wrong first: while CUDA ends a recording that has failed it says so again, and less well."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def padded_rows(rows: int, slots: int) -> int:
    """The next power of two, or all slots: shapes that repeat."""
    return min(1 << (rows - 1).bit_length(), slots)


def padded_length(length: int, most: int) -> int:
    """The next of 64, 96, 128, 192, 256, 384, ...: shapes that repeat, and at most a half is read in vain."""
    size = _LEAST_KV
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)

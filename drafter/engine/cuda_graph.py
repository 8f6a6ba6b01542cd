"""Whole steps as CUDA graphs: what the host decides about a step is its shape, and each shape is recorded once.

A step reads and writes buffers that are there for good, and what it reports is a few small tensors. So a step of a
shape is the same list of kernels each time, and to repeat it is one call instead of thousands.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.engine.step import StepOutcome

_LOG = logging.getLogger(__name__)
_LEAST_KV = 64
_Kind = tuple[SamplingMode, bool]
"""Sampling operations, and whether there are drafts."""


@dataclass(frozen=True)
class StepShape:
    """The host's decisions on a step. Steps of one shape run the same kernels on the same buffers.

    Args:
        rows: Slots `0..rows-1` are decoded; the last of them may be empty.
        nodes: Draft nodes of each row.
        kv_length: Cache positions that attention reads, where it does not read each row to its own length.
        mode: What sampling needs.
        biases: Most biased tokens of a row.
    """

    rows: int
    nodes: int
    kv_length: int
    mode: SamplingMode
    biases: int


Step = Callable[[], StepOutcome]


class Recorder(Protocol):
    """Makes steps that repeat others."""

    def watch(self, step: Step) -> tuple[StepOutcome, str | None]:
        """Do a step, and say what in it waits for the device: that cannot be recorded, and to try leaves damage."""

    def record(self, step: Step) -> Step:
        """Return what repeats a step: on the same buffers, reporting in the same tensors."""

    def restart(self) -> None:
        """Let go of the memory of all steps so far, which nobody repeats any more."""


class StepGraphs:
    """Steps by shape: the first of each is run as it is, the second is recorded, and then it is repeated.

    The sampling mode and whether there are drafts decide what is done. So of all shapes that have these in common, the
    first is watched once before it is recorded.

    Args:
        recorder: None where nothing can be recorded.
    """

    _MOST = 256
    """Recorded steps that are kept; each takes memory."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._seen: set[StepShape] = set()
        self._recorded: OrderedDict[StepShape, Step] = OrderedDict()
        self._clean: set[_Kind] = set()
        self._refused: set[_Kind] = set()

    @property
    def most(self) -> int:
        """Recorded steps that are kept; none where nothing can be recorded."""
        return 0 if self._recorder is None else self._MOST

    def run(self, shape: StepShape, step: Step) -> StepOutcome:
        """Do a step of this shape. Its report is only good until the next step, of whatever shape."""
        if shape not in self._recorded:
            kind = (shape.mode, shape.nodes > 0)
            if shape not in self._seen or self._recorder is None or kind in self._refused:
                self._seen.add(shape)  # what libraries put off until first needed must not be recorded
                return step()
            if kind not in self._clean:
                return self._watch(self._recorder, kind, step)
            if not self._try_to_record(self._recorder, shape, kind, step):
                return step()
        self._recorded.move_to_end(shape)
        return self._recorded[shape]()

    def warm_up(self, shape: StepShape, step: Step) -> None:
        """Do steps of this shape until the next one is repeated, or will never be."""
        for _ in range(3):
            if shape not in self._recorded:
                self.run(shape, step)

    def forget(self) -> None:
        """Let go of all recorded steps and their memory. What cannot be recorded is not tried again."""
        self._recorded.clear()
        if self._recorder is not None:
            self._recorder.restart()

    def _watch(self, recorder: Recorder, kind: _Kind, step: Step) -> StepOutcome:
        outcome, waits = recorder.watch(step)
        if waits is None:
            self._clean.add(kind)
        else:
            _LOG.warning("a step waits for the device, so it is no CUDA graph and runs kernel by kernel: %s", waits)
            self._refused.add(kind)
        return outcome

    def _try_to_record(self, recorder: Recorder, shape: StepShape, kind: _Kind, step: Step) -> bool:
        try:
            self._recorded[shape] = recorder.record(step)
        except RuntimeError as error:
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            reason = str(first).strip().split("\n")[0]
            _LOG.warning("a step cannot be recorded as a CUDA graph and runs kernel by kernel: %s", reason)
            self._refused.add(kind)
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
    return StepGraphs(_CudaRecorder(device) if len(all_devices) == 1 and graph_safe else None)


_RECORDING = threading.Lock()
"""CUDA watches and records for a whole process: two engines must not do it together."""


class _CudaRecorder:
    """Records CUDA graphs; see `Recorder`.

    All graphs share a pool of memory: they are repeated one after another, and none reads what another left there.
    Reports keep out of each other's way because they are held here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def watch(self, step: Step) -> tuple[StepOutcome, str | None]:
        before = torch.cuda.get_sync_debug_mode()
        with _RECORDING, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
        return outcome, f"{waits[0].filename}, line {waits[0].lineno}" if waits else None

    def record(self, step: Step) -> Step:
        device = self._device
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with _RECORDING, torch.cuda.device(device), torch.cuda.graph(graph, **how):
                report = step()
        except BaseException:
            torch.cuda.set_stream(before)
            self._failed.append(graph)  # the allocator may still ask it whether it is recording
            raise
        self._pool = graph.pool()

        def repeat() -> StepOutcome:
            graph.replay()
            return report

        return repeat

    def restart(self) -> None:
        self._pool = None


def _first(error: BaseException) -> BaseException:
    """Return the first error: after a failed recording CUDA reports it again, less precisely."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def padded_rows(rows: int, slots: int) -> int:
    """The next of 1, 2, 4, 8, 16, 24, 32, ..., or all slots: shapes that repeat, and few rows for nothing."""
    return min(1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8, slots)


def padded_length(length: int, most: int) -> int:
    """The next of 64, 96, 128, 192, 256, 384, ...: shapes that repeat, and at most a half is read in vain."""
    size = _LEAST_KV
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


def coarse_length(length: int, most: int) -> int:
    """The next of 64, 256, 1,024, ...: where little is read in vain, few shapes are worth more."""
    size = _LEAST_KV
    while size < length:
        size *= 4
    return min(size, most)

"""CUDA graphs of whole steps, one for each shape: one call repeats the thousands of kernels of a step."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drafter.acceptance.choices import SamplingMode
from drafter.engine.step import DeviceStep, StepTensors

_LOG = logging.getLogger(__name__)
MOST_GRAPHS = 256  # recorded steps that are kept; each takes memory
_LEAST_KV = 64
_RECORDING = threading.Lock()  # CUDA watches and records for a whole process: two engines must not do it together
_Kind = tuple[SamplingMode, bool]  # sampling operations, and whether there are drafts
Work = Callable[[], StepTensors]


@dataclass(frozen=True)
class StepShape:
    """The host's decisions on a step. Steps of one shape run the same kernels on the same buffers."""

    rows: int  # slots `0..rows-1` are decoded; the last of them may be empty
    nodes: int  # draft nodes of each row
    kv_length: int  # cache positions that attention reads, where it does not read each row to its own length
    mode: SamplingMode
    sizes: tuple[int, ...]  # of the settings of its choices; see `SamplingTable.sizes`


def step_shape(step: DeviceStep, rows: int, nodes: int, longest: int) -> StepShape:
    """Return the shape of a step of `rows` rows of at most `longest` tokens, with `nodes` draft nodes each."""
    state = step.state
    kv_length = padded_length(min(longest, state.max_length) + nodes + 1, state.capacity)
    if step.base.reads_to_length and state.cache.blocks.in_order:
        # Then only a drafter's work may follow from the length, and is little: that is no reason for many graphs.
        bounded = bool(nodes) and state.drafter.spec.bounded
        kv_length = coarse_length(kv_length, state.capacity) if bounded else state.capacity
    sizes = state.sampling.sizes if state.mode.biased or state.mode.limited else ()
    return StepShape(padded_rows(rows, state.slots), nodes, kv_length, state.mode, sizes)


class CudaRecorder:
    """Records work as CUDA graphs, which are repeated on the same buffers.

    All graphs share a pool of memory: they are repeated one after another, and none reads what another left there.
    Their results do not share memory because they are held here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def watch(self, work: Work) -> tuple[StepTensors, str | None]:
        """Run `work`; return its result, and where it waits for the device: a recording of that would fail."""
        before = torch.cuda.get_sync_debug_mode()
        with _RECORDING, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                tensors = work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
        return tensors, f"{waits[0].filename}, line {waits[0].lineno}" if waits else None

    def record(self, work: Work) -> Work:
        """Record `work`; return a function that repeats it, with the result in the same tensors."""
        device = self._device
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with _RECORDING, torch.cuda.device(device), torch.cuda.graph(graph, **how):
                tensors = work()
        except BaseException:
            torch.cuda.set_stream(before)
            self._failed.append(graph)  # the allocator may still ask it whether it is recording
            raise
        self._pool = graph.pool()

        def repeat() -> StepTensors:
            graph.replay()
            return tensors

        return repeat

    def restart(self) -> None:
        """Free the memory of all recorded work, which must not be repeated any more."""
        self._pool = None


def _first(error: BaseException) -> BaseException:
    """Return the first error: after a failed recording CUDA reports it again, less precisely."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class StepGraphs:
    """Steps by shape: the first of each runs as it is, the second is recorded, and then it is repeated.

    The sampling mode, and whether there are drafts, decide which operations there are. So the first shape of each such
    kind is watched once before it is recorded.

    Args:
        recorder: None where nothing can be recorded.
        decode: Does a step of a shape.
    """

    def __init__(self, recorder: CudaRecorder | None, decode: Callable[[StepShape], StepTensors]) -> None:
        self._recorder, self.decode = recorder, decode
        self._seen: set[StepShape] = set()
        self._recorded: OrderedDict[StepShape, Work] = OrderedDict()
        self._recordable: dict[_Kind, bool] = {}

    def repeats(self, shape: StepShape) -> bool:
        """Return whether a step of this shape takes what later ones will: it has been recorded, or none ever is."""
        return self._recorder is None or shape in self._recorded

    def run(self, shape: StepShape) -> StepTensors:
        """Do a step of this shape. The result is valid until the next step of any shape."""
        if shape not in self._recorded:
            kind = (shape.mode, shape.nodes > 0)
            recordable = self._recordable.get(kind)
            if shape not in self._seen or self._recorder is None or recordable is False:
                self._seen.add(shape)  # what libraries put off until first needed must not be recorded
                return self.decode(shape)
            if recordable is None:
                return self._watch(self._recorder, shape, kind)
            if not self._try_to_record(self._recorder, shape, kind):
                return self.decode(shape)
        self._recorded.move_to_end(shape)
        return self._recorded[shape]()

    def warm_up(self, shape: StepShape) -> None:
        """Do steps of this shape until the next one is repeated, or will never be."""
        for _ in range(3):
            if shape not in self._recorded:
                self.run(shape)

    def forget(self) -> None:
        """Free all recorded steps and their memory. What cannot be recorded is not tried again."""
        self._recorded.clear()
        if self._recorder is not None:
            self._recorder.restart()

    def _watch(self, recorder: CudaRecorder, shape: StepShape, kind: _Kind) -> StepTensors:
        tensors, waits = recorder.watch(lambda: self.decode(shape))
        self._recordable[kind] = waits is None
        if waits is not None:
            _LOG.warning("a step waits for the device, so it is no CUDA graph and runs kernel by kernel: %s", waits)
        return tensors

    def _try_to_record(self, recorder: CudaRecorder, shape: StepShape, kind: _Kind) -> bool:
        try:
            self._recorded[shape] = recorder.record(lambda: self.decode(shape))
        except RuntimeError as error:
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            reason = str(first).strip().split("\n")[0]
            _LOG.warning("a step cannot be recorded as a CUDA graph and runs kernel by kernel: %s", reason)
            self._recordable[kind] = False
            return False
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return True


def padded_rows(rows: int, slots: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 24, 32, … or all slots: few shapes, little padding."""
    return min(1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8, slots)


def padded_length(length: int, most: int) -> int:
    """Round up to 64, 96, 128, 192, 256, 384, …: few shapes, and at most half as much padding as text."""
    size = _LEAST_KV
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


def coarse_length(length: int, most: int) -> int:
    """Round up to 64, 256, 1,024, …: fewer shapes, where padding costs little."""
    size = _LEAST_KV
    while size < length:
        size *= 4
    return min(size, most)

"""CUDA graphs of parts of steps, one for each shape: one call repeats the thousands of kernels of a part."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

_LOG = logging.getLogger(__name__)
MOST_GRAPHS = 768  # recorded parts that are kept, of three a step; each takes memory
_RECORDING = threading.Lock()  # CUDA watches and records for a whole process: two engines must not do it together
Work = Callable[[], Any]


class Part(NamedTuple):
    """A part of a step. Parts that are equal run the same kernels on the same buffers."""

    kind: Hashable  # which operations there are
    shape: Hashable  # their sizes


class CudaRecorder:
    """Records work as CUDA graphs, which are repeated on the same buffers.

    All graphs share a pool of memory: they are repeated one after another, and none reads what another left there.
    Their results do not share memory because they are held here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def watch(self, work: Work) -> tuple[Any, str | None]:
        """Run `work`; return its result, and where it waits for the device: a recording of that would fail."""
        before, thread, waits = torch.cuda.get_sync_debug_mode(), threading.get_ident(), list[str]()

        def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *rest)
            elif threading.get_ident() == thread:  # another thread may wait as it likes
                waits.append(f"{filename}, line {lineno}")

        with _RECORDING, warnings.catch_warnings():
            warnings.simplefilter("always")
            show, warnings.showwarning = warnings.showwarning, note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return result, waits[0] if waits else None

    def record(self, work: Work) -> Work:
        """Record `work`; return a function that repeats it, with the result in the same tensors."""
        device = self._device
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with _RECORDING, torch.cuda.device(device), torch.cuda.graph(graph, **how):
                result = work()
        except BaseException:
            torch.cuda.set_stream(before)
            self._failed.append(graph)  # the allocator may still ask it whether it is recording
            raise
        self._pool = graph.pool()

        def repeat() -> Any:
            graph.replay()
            return result

        return repeat

    def restart(self) -> None:
        """Free the memory of all recorded work, which must not be repeated any more."""
        self._pool = None


def _first(error: BaseException) -> BaseException:
    """Return the first error: after a failed recording CUDA reports it again, less precisely."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class PartGraphs:
    """Parts of steps: the first run of each is as it is, the second is recorded, and then it is repeated.

    The first of each kind is watched once before it is recorded: what waits for the device cannot be.

    Args:
        recorder: None where nothing can be recorded.

    Attributes:
        slow: Runs so far that later ones of the same part will be faster than.
    """

    def __init__(self, recorder: CudaRecorder | None) -> None:
        self._recorder, self.slow = recorder, 0
        self._seen: set[Part] = set()
        self._recorded: OrderedDict[Part, Work] = OrderedDict()
        self._waits: dict[Hashable, bool] = {}  # by kind
        self._failed: set[Part] = set()

    def run(self, part: Part, work: Work) -> Any:
        """Do `work`, which depends on `part` and the contents of buffers alone.

        The result of a part that is repeated is valid until the next run of it.
        """
        recorder = self._recorder
        if part not in self._recorded:
            if recorder is None or part in self._failed or self._waits.get(part.kind):
                return work()
            self.slow += 1
            if part not in self._seen:
                self._seen.add(part)  # what libraries put off until first needed must not be recorded
                return work()
            if part.kind not in self._waits:
                return self._watch(recorder, part, work)
            if not self._try_to_record(recorder, part, work):
                return work()
        self._recorded.move_to_end(part)
        return self._recorded[part]()

    def forget(self) -> None:
        """Free all recorded parts and their memory. What cannot be recorded is not tried again."""
        self._recorded.clear()
        if self._recorder is not None:
            self._recorder.restart()

    def _watch(self, recorder: CudaRecorder, part: Part, work: Work) -> Any:
        result, waits = recorder.watch(work)
        self._waits[part.kind] = waits is not None
        if waits is not None:
            _LOG.warning("a step waits for the device, so a part is no CUDA graph and runs by kernels: %s", waits)
        return result

    def _try_to_record(self, recorder: CudaRecorder, part: Part, work: Work) -> bool:
        try:
            self._recorded[part] = recorder.record(work)
        except RuntimeError as error:
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            reason = str(first).strip().split("\n")[0]
            _LOG.warning("a part of a step cannot be recorded as a CUDA graph and runs by kernels: %s", reason)
            self._failed.add(part)
            return False
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return True

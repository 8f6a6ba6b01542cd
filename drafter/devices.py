"""Differences between devices: asynchrony, transfers, free memory, and large allocations of host memory."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from drafter.errors import first_line

_log = logging.getLogger(__name__)

T = TypeVar("T")
_MEMINFO, _STAT = Path("/proc/meminfo"), Path("/proc/stat")
_HUGE = 2 << 20  # bytes of a huge page
_CHUNK = 64 << 20  # bytes requested from the system at a time; untouched pages take no memory
_LINE = 64  # bytes of a cache line, to which pieces are aligned


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the device runs asynchronously, so that reading a result waits for all queued work."""
    return device.type == "cuda"


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and its seconds on the device."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start


class DeviceTimer:
    """Times parts of the work queued on a GPU: two events around each, which are read once that work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what a `with` block queues."""
        begin = self._mark()
        yield
        self._parts.append((name, begin, self._mark()))

    def seconds(self, name: str | None = None) -> float:
        """Return the seconds of all parts together, or of those with a name; they must be done."""
        parts = [(begin, end) for part, begin, end in self._parts if name in (None, part)]
        return sum(float(begin.elapsed_time(end)) for begin, end in parts) / 1000

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def device_timer(device: torch.device) -> DeviceTimer | None:
    """Return a timer for a GPU's work; None where the host's clock tells."""
    return DeviceTimer(device) if device.type == "cuda" else None


def watch_others() -> Callable[[], float]:
    """Return what tells the share of the machine's processors that other processes have had since; 0.0 if unknown."""

    def now() -> tuple[float, float]:
        try:
            used = [int(one) for one in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0.0, 0.0
        ours = time.process_time() * os.sysconf("SC_CLK_TCK")
        return sum(used), sum(used) - used[3] - used[4] - ours  # without idle processors, and those that wait for disks

    before = now()

    def share() -> float:
        passed, busy = (later - earlier for later, earlier in zip(now(), before, strict=True))
        return max(busy / passed, 0.0) if passed > 0 else 0.0

    return share


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of `work` and the memory of a GPU that it takes at most, the result's included; 0 elsewhere."""
    if device.type != "cuda":
        return work(), 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    return result, torch.cuda.max_memory_allocated(device) - before


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor that the host has just made to `device`, without waiting for queued work."""
    return staged(tensor, device).to(device, non_blocking=True)


def send_beside(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` while that does what has been queued; what is queued from now on waits for it."""
    if device.type != "cuda":
        return send(tensor, device)
    now, beside = torch.cuda.current_stream(device), _stream_beside(device)
    with torch.cuda.stream(beside):
        copy = send(tensor, device)
    now.wait_stream(beside)
    copy.record_stream(now)
    return copy


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Put a host tensor where `device` can copy it asynchronously (pinned memory)."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def wait_for(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, which waits for all queued work."""
    return tensor.cpu()


def fetch(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy a tensor to the host asynchronously; return it and the event of its arrival, None if it is there."""
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensor.device))
    return copy, arrived


def release_unused(device: torch.device) -> None:
    """Free PyTorch's unused memory: what is left may be enough, but fragmented."""
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a recording of a CUDA graph that failed may have left the allocator recording
            _log.warning("unused memory of %s cannot be given back: %s", device, first_line(error))


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory, on a GPU with PyTorch's unused part; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "cpu" and _MEMINFO.exists():
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.MULTILINE)
        return None if found is None else 1024 * int(found[1])
    return None


def in_passing_thread(work: Callable[[], T]) -> T:
    """Run `work` in a short-lived thread, whose pool of torch workers ends with it. Its errors are raised here."""
    with ThreadPoolExecutor(1, "passing") as thread:
        return thread.submit(work).result()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on the host that take memory only where they are written, such as a sparsely used KV cache."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(_mapped(max(size, 1)), dtype=torch.uint8, count=size).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros for a large buffer; on a CPU `lazy_zeros`."""
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def zero_untouched(buffer: Tensor) -> None:
    """Zero a large contiguous buffer as if nobody had used it.

    On a CPU under Linux its memory goes back to the system, which provides it again at the next write. A page that has
    been read before is one of zeros that all share: its first write replaces it in the address caches of all cores,
    which takes ten times as long while other threads compute.
    """
    if buffer.device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
        buffer.zero_()
        return
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if last <= first or libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        buffer.zero_()
        return
    flat = buffer.view(-1).view(torch.uint8)
    flat[: first - begin] = 0
    flat[last - begin :] = 0


class Pieces:
    """Allocates weights in huge pages, where the system has them; small ones share a chunk. Thread-safe.

    A step of a small batch is bound by reading the weights. With pages of 4 KiB the processor looks up an address for
    every few cache lines, and does not prefetch across pages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return zeros `[size]` uint8. The system gets the memory back once no piece of its chunk is left."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._rest):
                self._rest = _huge_pages(max(whole, _CHUNK))
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


def give_back() -> None:
    """Let the system have the memory that was freed. glibc keeps that of a model's weights otherwise."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _huge_pages(size: int) -> Tensor:
    memory = _mapped(size + _HUGE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _log.info("this system has no huge pages: %s", error)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

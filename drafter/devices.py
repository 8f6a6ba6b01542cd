"""What kinds of device differ in: who waits for whom, how much memory is left, how they are called."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from drafter.errors import first_line

_log = logging.getLogger(__name__)

T = TypeVar("T")
_MEMINFO = Path("/proc/meminfo")


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host queues work there and goes on, so that to look at a result is to wait for all of it."""
    return device.type == "cuda"


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds on the device."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which the host has just made, on `device`, without waiting for what is queued there."""
    return staged(tensor, device).to(device, non_blocking=True)


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the host where `device` can copy it from without anybody waiting."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def fetch(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of `tensor` for the host, without waiting, and what happens when it is there; None where it is."""
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensor.device))
    return copy, arrived


def release_unused(device: torch.device) -> None:
    """Give back what PyTorch holds without use: what is left may be enough, but in pieces."""
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a recording of a CUDA graph that failed may have left the allocator recording
            _log.warning("unused memory of %s cannot be given back: %s", device, first_line(error))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken, on a GPU those that PyTorch holds without use included; None if nobody knows."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "cpu" and _MEMINFO.exists():
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.MULTILINE)
        return None if found is None else 1024 * int(found[1])
    return None


# ---- Where torch computes on a CPU: in one thread only.

Result = TypeVar("Result")


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """Do something in a thread that ends with it, and takes its pool of workers along.

    Raises:
        Exception: Whatever `work` raises.
    """
    with ThreadPoolExecutor(1, "passing") as thread:
        return thread.submit(work).result()

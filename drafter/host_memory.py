"""Large memory on the host: for weights in huge pages where the system has them, for a KV cache only as it is written.

A step of a small batch is as fast as the weights are read. With pages of 4 KiB the processor looks up an address for
every few lines, and does not read ahead across a page. Of a KV cache little is in use, in many places: huge pages, or
zeros that are written, would make the system provide all of it at the start.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_HUGE = 2 << 20
"""Bytes of a huge page."""
_CHUNK = 64 << 20
"""Bytes that are asked of the system at a time. What is not touched takes no memory."""
_LINE = 64
"""Bytes of a line of the processor's caches, where each piece begins."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory where they are written, and not before."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(_mapped(max(size, 1)), dtype=torch.uint8, count=size).view(dtype).view(shape)


class Pieces:
    """Gives out pieces of memory that lie together, so that small ones have huge pages, too; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return zeros `[size]` uint8. The memory goes back to the system with the last of its neighbours."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._rest):
                self._rest = _huge_pages(max(whole, _CHUNK))
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


def _huge_pages(size: int) -> Tensor:
    """Zeros `[size]` uint8 that begin at a huge page."""
    memory = _mapped(size + _HUGE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _log.info("this system has no huge pages: %s", error)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

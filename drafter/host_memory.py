"""Large host memory: weights in huge pages where the system has them, and KV caches that take memory only as written.

A step of a small batch is bound by reading the weights. With pages of 4 KiB the processor looks up an address for every
few cache lines, and does not prefetch across pages. A KV cache is sparsely used: huge pages, or writing zeros, would
make the system provide all of it at the start.
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
"""Bytes requested from the system at a time. Untouched pages take no memory."""
_LINE = 64
"""Bytes of a cache line, to which pieces are aligned."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory only where they are written."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(_mapped(max(size, 1)), dtype=torch.uint8, count=size).view(dtype).view(shape)


class Pieces:
    """Allocates pieces of shared chunks, so that small ones have huge pages, too. Thread-safe."""

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

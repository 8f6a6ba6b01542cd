"""Memory for weights on the host, in huge pages where the system has them.

A step of a small batch is as fast as the weights are read. With pages of 4 KiB the processor looks up an address for
every few lines, and does not read ahead across a page. A KV cache is not kept here: little of it is in use, in many
places, and with huge pages the system would have to provide all of it.
"""

from __future__ import annotations

import logging
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
                self._rest = _mapped(max(whole, _CHUNK))
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


def _mapped(size: int) -> Tensor:
    """Zeros `[size]` uint8 that begin at a huge page."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _log.info("this system has no huge pages: %s", error)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)

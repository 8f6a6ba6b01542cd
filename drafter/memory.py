"""How much memory a device has left."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken, on a GPU those that PyTorch holds without use included; None if nobody knows."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "cpu" and _MEMINFO.exists():
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.MULTILINE)
        return None if found is None else 1024 * int(found[1])
    return None

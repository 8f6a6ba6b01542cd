"""The likeliest token of each node, and whether a row's logits are numbers.

Both read all logits, in every step. On the host NumPy does so on the thread that asks, in a fraction of the time that
it takes to wake others for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter import devices


def likeliest(logits: Tensor) -> Tensor:
    """Return the token of the largest of logits `[B, N, V]`, the first of several, `[B, N]` int64."""
    if _reads_on_host(logits):
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def are_sound(logits: Tensor) -> Tensor:
    """Return whether none of a row's logits `[B, N, V]` is NaN or +inf, `[B]`; the largest is NaN if any is."""
    if _reads_on_host(logits):
        return torch.from_numpy(logits.numpy().max((1, 2))).isfinite()
    return logits.amax((1, 2)).isfinite()


def _reads_on_host(logits: Tensor) -> bool:
    return not devices.is_asynchronous(logits.device) and logits.dtype in (torch.float32, torch.float64)

"""What kinds of device differ in."""

from __future__ import annotations

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host queues work there and goes on, so that to look at a result is to wait for all of it."""
    return device.type == "cuda"


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which the host has just made, on `device`, without waiting for what is queued there."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

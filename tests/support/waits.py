"""Which operations a GPU's host would wait for, or would bake into a CUDA graph, told without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WAITING = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "argwhere",
    "bincount",
    "equal",
    "histogram",
    "is_nonzero",
    "item",
    "lift_fresh",
    "lift_fresh_copy",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
"""Operations whose result has a size, or is a number, that only the device knows. `lift_fresh` is what `torch.tensor`
does: the host makes numbers, and waits until a device has taken them."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in an operation's arguments or results, much faster than PyTorch's function for any tree."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in tensors_of(one)]


def why_it_waits(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return why an operation waits for the device, or None.

    Args:
        func: The operation, as a dispatch mode gets it.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    name = func.overloadpacket.__name__
    if name in _WAITING:
        return f"{func} waits for the device"
    if name in _INDEXING and any(_is_mask(one) for one in args[1]):
        return f"{func} by a mask waits for the device: how many are chosen?"
    if name == "where" and len(args) == 1:
        return f"{func} of a mask alone waits for the device"
    if name == "repeat_interleave" and "ensor" in func._overloadname and kwargs.get("output_size") is None:
        return f"{func} by a tensor waits for the device: how many are there?"
    if name == "tensor_split" and any(isinstance(one, Tensor) for one in args[1:]):
        return f"{func} by a tensor waits for the device"
    return None


def why_it_copies(func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
    """Return why an operation is no work of one kind of device alone, or None; see `why_it_waits`.

    A number of the host, too, is read when a graph is recorded, and never again.
    """
    kinds = {one.device.type for one in tensors_of((args, kwargs, result))}
    return f"{func} goes from one kind of device to another: {', '.join(sorted(kinds))}" if len(kinds) > 1 else None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)

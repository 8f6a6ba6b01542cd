"""Operations of a piece of work as PyTorch dispatches them: kernels, bytes read, and memory that is taken meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "lift_fresh"}
"""Operations that take memory and run nothing on it."""
_CHOOSING = {"embedding", "index_select", "gather", "index", "take_along_dim"}
"""Operations that read of their first tensor, or of `embedding`'s weights, as much as they return."""
_FILLING = {"index_copy_", "index_copy", "index_put_", "scatter_", "index_fill_", "copy_", "fill_", "zero_"}
"""Operations that write into their first tensor, and do not read it."""


@dataclass(frozen=True)
class Result:
    """What an operation has made: a tensor of `shape` and `dtype`."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return torch.Size(self.shape).numel()


class OperationCounts(TorchDispatchMode):
    """Counts what runs while it is entered. Works on fake tensors, too, which have no numbers and take no memory.

    A view is not counted. An operation that makes or changes a tensor counts as one kernel. It reads each tensor that
    it is given once, but of one that it only chooses from no more than it returns, and of an expanded one what there
    is.

    Attributes:
        kernels: Number of operations that do something, by name.
        bytes_read: Bytes that they read.
        results: All tensors that were made, in order.
        peak_bytes: Most bytes of tensors that were made meanwhile and in use at the same time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.bytes_read = self.peak_bytes = self._held = 0
        self.results: list[Result] = []
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        known = {one.untyped_storage()._cdata for one in given}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        new = [one for one in made if one.untyped_storage()._cdata not in known]
        for one in new:
            self._hold(one)
            self.results.append(Result(name, tuple(one.shape), one.dtype))
        if (new or func._schema.is_mutable) and name not in _ALLOCATIONS:
            self.kernels[name] += 1
            self.bytes_read += _bytes_read(name, given, made)
        return result

    @property
    def num_kernels(self) -> int:
        """Number of operations that do something."""
        return self.kernels.total()

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            size = storage.nbytes()
            self._known.add(storage)
            self._held += size
            self.peak_bytes = max(self.peak_bytes, self._held)
            weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self._held -= size


def _bytes_read(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    if name in _FILLING:
        return sum(map(_nbytes, given[1:]))
    if name in _CHOOSING:
        return sum(map(_nbytes, made)) + sum(map(_nbytes, given[1:]))
    return sum(map(_nbytes, given))


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor has in memory: an expanded dimension has one."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.itemsize

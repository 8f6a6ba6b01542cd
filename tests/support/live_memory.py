"""How many bytes of tensors there are at a time, counted on any device, also of tensors that have no numbers."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.waits import tensors_of


class LiveMemory(TorchDispatchMode):
    """Counts what operations allocate while it is entered, and what of it is given up.

    Attributes:
        now: Bytes of the tensors that are left.
        peak: Most of them at a time.
        largest: Bytes of the largest one there has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tensors_of((args, kwargs)):
            self._known.add(one.untyped_storage())  # it was there before
        result = func(*args, **(kwargs or {}))
        for one in tensors_of(result):
            if (storage := one.untyped_storage()) not in self._known:
                self._known.add(storage)
                size = storage.nbytes()
                self.now += size
                self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
                weakref.finalize(storage, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.now -= size

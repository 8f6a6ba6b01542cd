"""CUDA graphs without a GPU: a step is recorded as the list of its operations, and the list is repeated.

Like a CUDA graph, a tape repeats operations on the tensors that they were recorded with, whatever the host thinks by
then; and what would wait for the device cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafter import devices
from drafter.engine.cuda_graph import Work
from drafter.engine.step import StepTensors
from drafter.target_model.mixers import Mixer
from drafter.target_model.model import BaseModel
from tests.support.waits import why_it_copies, why_it_waits

_READERS = ("tolist", "numpy", "__array__")
"""Methods of tensors that look at numbers without an operation of PyTorch's."""


class Waits(TorchDispatchMode):
    """Hands whatever would wait for the device to `found`, while it is entered; see `tests.support.waits`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._patches = ExitStack()

    def found(self, reason: str) -> None:
        """Deal with it."""
        raise RuntimeError(reason)

    def __enter__(self) -> Self:
        for owner, name in [(torch, "from_numpy"), *((torch.Tensor, name) for name in _READERS)]:
            self._patches.enter_context(mock.patch.object(owner, name, self._told(name, getattr(owner, name))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (reason := why_it_waits(func, args, kwargs)) is not None:
            self.found(reason)
        result = func(*args, **kwargs)
        if (reason := why_it_copies(func, args, kwargs, result)) is not None:
            self.found(reason)
        return result

    def _told(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            self.found(f"{name} is done by the host")
            return call(*args, **kwargs)

        return tell


class Tape(Waits):
    """Records operations while it is entered, and refuses what would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def repeat(self, report: Any) -> Any:
        """Repeat all operations. Return what `report`, a step's tensors or nothing, has become."""
        now: dict[int, Tensor] = {}

        # PyTorch's own functions for nested arguments take ten times as long as the operations.
        def current(value: Any) -> Any:
            if isinstance(value, Tensor):
                return now.get(id(value), value)
            return [current(one) for one in value] if isinstance(value, list | tuple) else value

        def note(old: Any, new: Any) -> None:
            if isinstance(old, Tensor):
                now[id(old)] = new
            elif isinstance(old, list | tuple):
                for pair in zip(old, new, strict=True):
                    note(*pair)

        for func, args, kwargs, recorded in self.operations:
            given = {name: current(value) for name, value in kwargs.items()} if kwargs else kwargs
            note(recorded, func(*map(current, args), **given))
        if not isinstance(report, StepTensors):
            return report
        return replace(report, packed=current(report.packed), lenient=current(report.lenient))


class Watch(Waits):
    """Notes what waits for the device while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def found(self, reason: str) -> None:
        self.waits.append(reason)


class TapeRecorder:
    """Records the parts of an engine's steps in place of CUDA graphs. Called with a device, it is the recorder for it.

    Attributes:
        watched, recorded, repeated: Number of parts.
        restarts: How often all were forgotten.
    """

    def __init__(self) -> None:
        self.watched = self.recorded = self.repeated = self.restarts = 0

    def __call__(self, device: torch.device) -> TapeRecorder:
        return self

    def watch(self, step: Work) -> tuple[Any, str | None]:
        self.watched += 1
        with Watch() as watch:
            outcome = step()
        return outcome, watch.waits[0] if watch.waits else None

    def record(self, step: Work) -> Work:
        # Recording does the step, as it does not on a GPU: so it counts as the first time that it is repeated.
        tape = Tape()
        with tape:
            report = step()
        self.recorded += 1
        first = True

        def repeat() -> Any:
            nonlocal first
            self.repeated += 1
            if first:
                first = False
                return report
            return tape.repeat(report)

        return repeat

    def restart(self) -> None:
        self.restarts += 1


def queue_steps(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """Have engines treat the CPU as a device that works behind their back, with tapes for CUDA graphs.

    All bases are run by the model's own code meanwhile, as on a GPU: a tape has PyTorch's operations, and none of the
    native library's.
    """
    recorder = TapeRecorder()
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr("drafter.engine.cuda_graph.CudaRecorder", recorder)
    monkeypatch.setattr("drafter.engine.warm_up.record_steps", lambda queue, nodes: None)
    own_code = property(lambda base: base._model_code, lambda base, executor: vars(base).update(_executor=executor))
    monkeypatch.setattr(BaseModel, "_executor", own_code, raising=False)
    monkeypatch.setattr(Mixer, "native", property(lambda mixer: None, lambda mixer, native: None), raising=False)
    return recorder

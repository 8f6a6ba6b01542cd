"""CUDA graphs without a GPU: a step is recorded as the list of its operations, and the list is repeated.

Like a CUDA graph, a tape repeats operations on the tensors that they were recorded with, whatever the host thinks by
then; and what would wait for the device cannot be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from drafter.engine.steps.cuda_graphs import Step
from drafter.engine.steps.outcome import StepOutcome

_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "item", "equal", "lift_fresh"}
"""The last is what `torch.tensor` does: the host makes numbers, and waits until a device has taken them."""


class Tape(TorchDispatchMode):
    """Records operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def repeat(self, report: StepOutcome) -> StepOutcome:
        """Repeat all operations. Return what `report` has become."""
        now: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, recorded in self.operations:
            result = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, new in zip(tree_flatten(recorded)[0], tree_flatten(result)[0], strict=True):
                if isinstance(old, torch.Tensor):
                    now[id(old)] = new
        return StepOutcome(current(report.packed), current(report.log_probs), None)


class Watch(TorchDispatchMode):
    """Notes what waits for the device while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


class TapeRecorder:
    """Records the steps of an engine in place of CUDA graphs. Called with a device, it is the recorder for it.

    Attributes:
        watched, recorded, repeated: Number of steps.
        restarts: How often all were forgotten.
    """

    def __init__(self) -> None:
        self.watched = self.recorded = self.repeated = self.restarts = 0

    def __call__(self, device: torch.device) -> TapeRecorder:
        return self

    def watch(self, step: Step) -> tuple[StepOutcome, str | None]:
        self.watched += 1
        with Watch() as watch:
            outcome = step()
        return outcome, watch.waits[0] if watch.waits else None

    def record(self, step: Step) -> Step:
        # Recording does the step, as it does not on a GPU: so it counts as the first time that it is repeated.
        tape = Tape()
        with tape:
            report = step()
        self.recorded += 1
        first = True

        def repeat() -> StepOutcome:
            nonlocal first
            self.repeated += 1
            if first:
                first = False
                return report
            return tape.repeat(report)

        return repeat

    def restart(self) -> None:
        self.restarts += 1

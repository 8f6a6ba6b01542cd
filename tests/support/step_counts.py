"""Counts by kind of row what a step on a GPU leaves outside of its CUDA graphs, and how often the host waits for it.

    python -m tests.support.step_counts    # prints lines of the table of docs/gpu.md

A CPU stands for the GPU, and tapes for graphs. What the host has made itself, or has fetched, is no work of the GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafter.budget.contract import FixedBudget
from drafter.drafters.contract import Ask, Drafter, PlainDecoding
from drafter.drafters.merged import ChoosingDrafter
from drafter.drafters.registry import load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.engine.step import Flights
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.model import BaseModel
from tests.support.guides import RuleGuides
from tests.support.heads import make_head
from tests.support.hybrids import hybrid_base
from tests.support.models import EOS, VOCABULARY, SpellingTokenizer, base_of
from tests.support.tapes import TapeRecorder, queue_steps
from tests.support.waits import tensors_of

NODES = 3
_VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "detach_", "expand", "permute", "resolve_conj", "resolve_neg",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip
"""Operations that run nothing, as a copy to where a tensor is already."""
_FROM_NUMBERS = {"lift_fresh", "lift_fresh_copy"}
_WAITING = {"_local_scalar_dense", "is_nonzero", "item", "nonzero"}
_WARM, _COUNTED = 14, 5  # steps


class StepCounts(TorchDispatchMode):
    """Counts operations outside of graphs, and waits, while it is entered.

    A tensor is the host's if the host has fetched it, or all that it was made of is the host's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.waits = 0
        self.in_graph = False
        self._of_host: dict[int, Tensor] = {}  # held, so that no other tensor takes the memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.in_graph:
            return result
        name = func.overloadpacket.__name__
        made_of = tensors_of((args, kwargs))
        if name in _FROM_NUMBERS or all(map(self._is_of_host, made_of)):
            for one in tensors_of(result):
                self.fetched(one)
        elif name in _WAITING:
            self.waits += 1
        elif name not in _VIEWS:
            self.operations += 1
        return result

    def fetched(self, tensor: Tensor) -> None:
        self._of_host[tensor.untyped_storage().data_ptr()] = tensor

    def _is_of_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._of_host

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count for a `with` block."""
        own_cpu, own_land = Tensor.cpu, Flights.land

        def cpu(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            if not self._is_of_host(tensor):
                self.waits += 1
                self.operations -= 1  # the copy to the host is what it waits for
            self.fetched(copy)
            return own_cpu(copy)

        def land(flights: Flights, keep: int) -> Iterator[Any]:
            for landed in own_land(flights, keep):
                self.waits += 1
                yield landed

        with mock.patch.object(Tensor, "cpu", cpu), mock.patch.object(Flights, "land", land), self:
            yield


class Always(FixedBudget):
    """Lets one member draft."""

    def __init__(self, nodes: int, member: int) -> None:
        super().__init__(nodes)
        self._planned = Ask(nodes, 0.1, member)

    def plan(self, rows: int) -> Ask:
        return self._planned


def _head(base: BaseModel) -> Drafter:
    return make_head(base, "ctc").drafter(base, NODES)


def _memory(base: BaseModel) -> Drafter:
    return load_drafter("memory", base, NODES)


def _all_members(base: BaseModel) -> Drafter:
    return ChoosingDrafter({"head": _head(base), "memory": _memory(base)})


Make = Callable[[BaseModel], Drafter]
PLAIN: Make = lambda base: PlainDecoding()  # noqa: E731 - of the same kind as those above
_GUIDED = {"structured_outputs": StructuredOutputs(regex="x")}
KINDS: dict[str, tuple[str, Make, dict[str, Any], int]] = {
    "plain": ("llama", PLAIN, {}, 0),
    "drafts of a head": ("llama", _head, {}, 0),
    "drafts of a head, sampled": ("llama", _head, {"temperature": 0.8, "top_p": 0.9}, 0),
    "drafts of a head, log-probabilities": ("llama", _head, {"logprobs": 2}, 0),
    "plain, with a guide": ("llama", PLAIN, _GUIDED, 0),
    "drafts of a head, with a guide": ("llama", _head, _GUIDED, 0),
    "`memory`, which drafts on the host": ("llama", _memory, {}, 0),
    "drafts of a head; devices are allowed": ("llama", _head, {}, 0),
    "a device's draft in each step": ("llama", _head, {}, 0),
    "`auto` with all members; the head drafts": ("llama", _all_members, {}, 0),
    "`auto` with all members; `memory` drafts": ("llama", _all_members, {}, 1),
    "recurrent layers, drafts of a head": ("qwen3_next", _head, {}, 0),
    "recurrent layers, drafts of a head, with a guide": ("qwen3_next", _head, _GUIDED, 0),
}
"""Target model, drafter, settings of the second of two rows, and the member of `auto` that drafts."""


def counted(name: str, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return operations outside of graphs, and waits of the host, of a usual step."""
    family, make, settings, member = KINDS[name]
    base = base_of(family) if family == "llama" else hybrid_base(family)
    recorder, counts = queue_steps(patch), StepCounts()
    _tell_graphs(recorder, counts, patch)
    rule = RuleGuides(lambda output: set(range(3, 40)), VOCABULARY, EOS)
    drafter = make(base)
    budget = Always(min(NODES, drafter.spec.max_nodes), member)
    config, brought = EngineConfig(2, 96), NODES if "device" in name else 0
    engine = Engine(base, drafter, SpellingTokenizer(), config, budget=budget, guides=rule, brought=brought)
    how = [{}, settings]
    handles = [
        engine.submit(Request([5 + row, 6, 7], SamplingParams(90, ignore_eos="structured_outputs" not in one, **one)))
        for row, one in enumerate(how)
    ]
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(_WARM + _COUNTED):
        if "device's" in name:
            _send(handles[1], engine)
        if step < _WARM:
            engine.step()
            continue
        counts.operations = counts.waits = 0
        with counts.counting():
            engine.step()
        seen[counts.operations, counts.waits] += 1
    assert len(engine.scheduler.active) == 2
    return seen.most_common(1)[0][0]


def _tell_graphs(recorder: TapeRecorder, counts: StepCounts, patch: pytest.MonkeyPatch) -> None:
    """Let `counts` know what is done by a graph."""
    own = recorder.record

    def record(work: Callable[[], Any]) -> Callable[[], Any]:
        repeat = own(work)

        def noted() -> Any:
            counts.in_graph = True
            try:
                return repeat()
            finally:
                counts.in_graph = False

        return noted

    patch.setattr(recorder, "record", record)


def _send(handle: Handle, engine: Engine) -> None:
    for sequence in engine.scheduler.in_slots:
        if sequence.handle is handle:
            handle.draft([5, 6], [-1, 0], len(sequence.output))


def counts() -> Iterator[tuple[str, int, int]]:
    """Yield all kinds, with what `counted` says of them."""
    for name in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            yield name, *counted(name, patch)


if __name__ == "__main__":
    for line in counts():
        print("|", " | ".join(map(str, line)), "|")

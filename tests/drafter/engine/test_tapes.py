"""The stand-ins for CUDA graphs refuse what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafter.engine.step import StepTensors
from tests.support.fake_gpus import fake_gpus
from tests.support.tapes import Tape, Watch

ARRAY = torch.ones(3).numpy()
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a mask as index": lambda x: x[x > 1],
    "a mask as index beside others": lambda x: x[torch.arange(3)[:, None], x > 1] if x.dim() > 1 else x[x > 1],
    "writing at a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "where of a mask": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: torch.arange(3).repeat_interleave(x.long()),
    "masked_select": lambda x: x.masked_select(x > 1),
    "bincount": lambda x: x.long().bincount(),
    "split": lambda x: x.tensor_split(x[:1].long()),
    "a comparison of all": lambda x: torch.equal(x, x),
    "a number": lambda x: x[0].item(),
    "a condition": lambda x: bool(x.any()),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "numbers of the host": lambda x: x + torch.tensor([1.0]),
    "an array of the host": lambda x: x + torch.from_numpy(ARRAY),
}
ALLOWED: dict[str, Callable[[Tensor], object]] = {
    "where": lambda x: torch.where(x > 1, x, 0),
    "indices": lambda x: x[torch.arange(2)],
    "masked_fill": lambda x: x.masked_fill(x > 1, 0),
    "repeat_interleave of a known size": lambda x: torch.arange(3).repeat_interleave(x.long(), output_size=3),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(2),
    "topk": lambda x: x.topk(2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_numbers_is_refused(name: str) -> None:
    tensor = torch.ones(3)
    with pytest.raises(RuntimeError), torch.inference_mode(), Tape():
        REFUSED[name](tensor)
    with torch.inference_mode(), Watch() as watch:
        REFUSED[name](tensor)
    assert watch.waits
    assert tensor.tolist() == [1.0] * 3  # what Python's own methods do is as before


@pytest.mark.parametrize("name", ALLOWED)
def test_what_depends_on_shapes_alone_is_recorded(name: str) -> None:
    with torch.inference_mode(), Tape() as tape:
        ALLOWED[name](torch.ones(3))
    assert tape.operations


def test_a_copy_from_one_kind_of_device_to_another_is_refused() -> None:
    with fake_gpus(), torch.inference_mode():
        gpu, other, host = (torch.empty(3, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
        with Tape():
            gpu.to(other.device)
        for copy in (lambda: gpu.cpu(), lambda: host.to(gpu.device), lambda: gpu + host[0], lambda: gpu.copy_(host)):
            with pytest.raises(RuntimeError, match="from one kind of device to another"), Tape():
                copy()  # type: ignore[no-untyped-call]


def test_a_tape_repeats_what_it_has_recorded() -> None:
    total = torch.zeros(2)
    with torch.inference_mode(), Tape() as tape:
        total += 1
        report = StepTensors(total * 2, 0)
    assert tape.repeat(report).packed.tolist() == [4.0, 4.0]

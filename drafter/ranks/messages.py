"""Calls of a target model and of its caches as bytes, in which rank 0 sends them to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

MODEL, EMBEDDING, HEAD = 0, 1, 2
"""Numbers of what all ranks have from the beginning. Caches follow, in the order in which they are made."""
FIRST_CACHE = 3
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """What all ranks know an object by: a number, and the name of an attribute of what has that number, or none."""

    number: int
    attribute: str = ""


@dataclass(frozen=True)
class Call:
    """A call of a method of an object, or a question for its attribute `name`, where it has no `args`."""

    target: Place
    name: str
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]


class Message(NamedTuple):
    calls: list[Call]
    checksum: Tensor | None  # rank 0's own, before these calls; see `Witness`


class _Writer(pickle.Pickler):
    def __init__(self, file: BytesIO, place_of: Callable[[object], Place | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._place_of, self.sent = place_of, list[Tensor]()

    def persistent_id(self, value: Any) -> Any:
        if (place := self._place_of(value)) is not None:
            return place
        if not isinstance(value, Tensor):
            return None
        form = value.dtype, tuple(value.shape)
        if value.device.type == "cpu":  # its own numbers alone: it may be a view of a large buffer
            return *form, value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.sent.append(value)
        return *form, None


class _Reader(pickle.Unpickler):
    def __init__(self, file: BytesIO, find: Callable[[Place], Any], device: torch.device) -> None:
        super().__init__(file)
        self._find, self._device = find, device

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, Place):
            return self._find(pid)
        dtype, shape, content = pid
        if content is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            distributed.broadcast(tensor, 0)
            return tensor
        if not content:
            return torch.empty(shape, dtype=dtype)
        # A copy, which begins where tensors do: kernels may round in another way elsewhere.
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape).clone()


def send(message: Message, place_of: Callable[[object], Place | None], write: Callable[[bytes], object]) -> None:
    """Write a message: a host's tensors with it, and a GPU's from GPU to GPU, without waiting for either.

    `place_of` tells what all ranks have; everything else is copied.
    """
    file = BytesIO()
    writer = _Writer(file, place_of)
    writer.dump(tuple(message))
    write(file.getvalue())
    for tensor in writer.sent:
        distributed.broadcast(tensor.contiguous(), 0)


def receive(content: bytes, find: Callable[[Place], Any], device: torch.device) -> Message:
    """Read a message, with the present objects for the places in it, and a GPU's tensors on `device`."""
    return Message(*_Reader(BytesIO(content), find, device).load())


class Witness:
    """A checksum of what a model's LM head got last: all ranks have the same bits there for as long as they agree.

    What layers compute apart is summed over the ranks, which all get the same sum. A rank differs where it computes
    another thing than the others of the same numbers, or is asked for another thing than they are.
    """

    def __init__(self, head: nn.Module) -> None:
        self.checksum: Tensor | None = None
        self.hook = head.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        states = args[0][..., -1, :].contiguous()
        self.checksum = states.view(_BITS[states.element_size()]).sum(dtype=torch.int64)

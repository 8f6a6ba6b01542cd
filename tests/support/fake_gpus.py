"""GPUs without a GPU: tensors that have a shape, a type and a CUDA device, but no numbers.

What is done with them fails where two devices meet, and where the host would look at a number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from drafter import devices
from drafter.ctc import prefix_search as static
from drafter.target_model.attention import flash_prefix_attention
from drafter.target_model.model import BaseModel

_CUDA, _META = 1, 14
"""Numbers of device types in PyTorch."""


@contextmanager
def fake_gpus() -> Iterator[None]:
    """For a `with` block, tensors that are made are fakes."""
    fakes = FakeTensorMode(allow_non_fake_inputs=False)
    # Fakes cannot be pinned, and take no memory. What the host has made is a tensor with numbers until it is sent.
    pin = mock.patch.object(Tensor, "pin_memory", lambda tensor: fake(tensor, torch.device("cpu")))
    free_bytes = mock.patch.object(devices, "free_bytes", return_value=None)
    kept = mock.patch.object(static, "_rank_tensor", cache(static._rank_tensor.__wrapped__))
    # A proof looks at numbers, and there are none.
    proof = mock.patch("drafter.heads.attention.prefix_attention_agrees", return_value=True)
    with fakes, _guarded(), pin, free_bytes, kept, proof:
        yield


@contextmanager
def _guarded() -> Iterator[None]:
    """Let CUDA's tensors be handled where PyTorch is built without CUDA.

    Before an operation PyTorch makes the tensor's device the present one. Who does that for CUDA is missing there; the
    meta device's, who does nothing, takes the place.
    """
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


def base_of_shape(config: Any) -> BaseModel:
    """Return a base in bf16 of any size, without weights: it runs once `move_to_gpus` has given it fakes.

    What is proved at load is taken to be so.
    """

    def agrees(base: BaseModel, change: Callable[[], None], longest: int = 0) -> bool:
        change()
        return True

    with ExitStack() as taken:
        for name, result in (("prepack", None), ("prove_tree_decoding", None), ("target_fingerprint", "fake")):
            taken.enter_context(mock.patch(f"drafter.target_model.model.{name}", return_value=result))
        taken.enter_context(mock.patch("drafter.target_model.model.attention_agrees", agrees))
        # As on a GPU, where the weights go later.
        taken.enter_context(
            mock.patch("drafter.target_model.model.prefix_attention_on", return_value=flash_prefix_attention)
        )
        with torch.device("meta"):
            # Of a configuration of its own: which attention it has is noted there.
            model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)
        base = BaseModel(model, "fake", native=False)
        assert base.allow_packing()
    return base


def move_to_gpus(base: BaseModel, count: int) -> None:
    """Replace a base's weights by fakes, its layers shared out to `count` GPUs as with transformers' device map."""
    gpus = [torch.device("cuda", number) for number in range(count)]
    layers = list(base._model_code._layers.modules)
    of_layer = [gpus[number * count // len(layers)] for number in range(len(layers))]
    for module in base.model.modules():
        place_weights(module, gpus[0])
    for last in (base.model.get_output_embeddings(), base.decoder.get_submodule("norm")):
        _pin(last, gpus[-1])
    for layer, gpu in zip(layers, of_layer, strict=True):
        _pin(layer, gpu)
    add_hook_to_module(base.model, AlignDevicesHook(gpus[0], io_same_device=True))
    base.caches.shapes = [
        replace(shape, device=gpu) if shape else None for shape, gpu in zip(base.caches.shapes, of_layer, strict=True)
    ]
    base._model_code._device = gpus[0]
    if count > 1:  # as `BaseModel` decides it
        base._model_code.prefix_attention = None


def place_weights(module: nn.Module, device: torch.device) -> None:
    """Replace the parameters and buffers of one module, but not of its parts, by fakes on a device."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(fake(parameter, device), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fake(buffer, device)


def _pin(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        place_weights(part, device)
    add_hook_to_module(module, AlignDevicesHook(device))


def fake(tensor: Tensor, device: torch.device) -> Tensor:
    """Return what a tensor is once it is sent to a device; within `fake_gpus`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

"""Linear layers on a CPU whose weights are laid out once, as oneDNN's kernels read them.

A product of a few rows, which is what decoding and verification are made of, takes as long as its weights take to be
read. MKL, which PyTorch asks, lays them out anew in every call: with ten rows that is several times the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drafter.memory import free_bytes

_SHARE = 0.5
"""Of the memory that is left, what a second copy of the weights may take."""
_SMALL = 1 << 18
"""Weights of a matrix that a single row is multiplied by faster as it is."""

# A name of our own, because the compiler has an opinion on what may call oneDNN's by its own.
_library = torch.library.Library("drafter", "DEF")
_library.define("prepacked_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


def _prepacked_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]


_library.impl("prepacked_linear", _prepacked_linear, "CPU")
_library.impl("prepacked_linear", _prepacked_linear, "MkldnnCPU")


def _shape_of_it(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


torch.library.register_fake("drafter::prepacked_linear", _shape_of_it)


class PrepackedLinear(nn.Linear):
    """A linear layer that `prepack` has made ready. With gradients or autocast it computes as PyTorch does."""

    packed: Tensor
    """The weights, laid out."""
    version: int
    """Of the weights when they were; a layer whose weights have changed since does without."""

    @property
    def _small(self) -> bool:
        return self.in_features * self.out_features < _SMALL

    def forward(self, input: Tensor) -> Tensor:
        """`[..., out_features]` of `[..., in_features]`."""
        rows = input.numel() // self.in_features
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not rows or (rows == 1 and self._small):
            return super().forward(input)
        if torch.compiler.is_compiling():
            return torch.ops.drafter.prepacked_linear.default(input, self.packed, self.bias)  # type: ignore[no-any-return]
        if self.weight._version != self.version:
            return super().forward(input)
        return _prepacked_linear(input, self.packed, self.bias)


@torch.no_grad()
def prepack(module: nn.Module) -> None:
    """Lay out the weights of all linear layers in `module` for a CPU, if they are on one, in float32.

    It takes as much memory again as they do; where there is not plenty of it left, they stay as they are.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _is_plain(layer)]
    free = free_bytes(torch.device("cpu"))
    size = sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or (free is not None and size > _SHARE * free):
        return
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None)
        vars(layer).update(packed=packed, version=layer.weight._version)
        layer.__class__ = PrepackedLinear


@contextmanager
def as_loaded(module: nn.Module) -> Iterator[None]:
    """For a `with` block, the linear layers in `module` compute as if they had not been prepacked."""
    layers = [layer for layer in module.modules() if type(layer) is PrepackedLinear]
    for layer in layers:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = PrepackedLinear


def _is_plain(layer: nn.Linear) -> bool:
    """Whether it is as PyTorch has it: quantised ones have weights of other kinds."""
    if type(layer) not in (nn.Linear, PrepackedLinear) or type(layer.weight) is not nn.Parameter:
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32

"""Linear layers on a CPU whose weights are laid out once, for kernels that are made for few rows.

A product of a few rows, which is what decoding and verification are made of, takes as long as its weights take to be
read. MKL, which PyTorch asks, lays them out anew in every call, which with ten rows takes several times as long as the
product.

Weights of fp32 that came from a checkpoint of half the precision, as most do, are read as fp16 where that loses
nothing: times a power of two, which is taken out of the product again. Sums and activations are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from drafter.memory import free_bytes

_SHARE = 0.5
"""Of the memory that is left, what a second copy of the weights may take."""
_SMALL = 1 << 18
"""Weights of a matrix that a single row is multiplied by faster as it is than by oneDNN."""
_FEW = 64
"""Rows up to which a product takes as long as its weights take to be read, more or less."""
_HALF_EXPONENT = 15
"""Of the largest weight in fp16, so that the smallest ones, too, are numbers that it has."""

Product = Callable[[Tensor], Tensor]
"""From rows `[..., in_features]` to `[..., out_features]`."""


class PrepackedLinear(nn.Linear):
    """A linear layer that `prepack` has made ready. With gradients or autocast it computes as PyTorch does."""

    product: Product
    halved: bool
    """Whether it reads its weights as fp16 for a few rows."""
    version: int
    """Of the weights that `product` has; when they have changed since it is not used."""
    number: int
    """Of the layer, in compiled code."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., out_features]` of `[..., in_features]`."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or input.dim() < 2 or not input.numel():
            return super().forward(input)
        if torch.compiler.is_compiling():
            return torch.ops.drafter.prepacked_linear.default(input, self.number, self.out_features)  # type: ignore[no-any-return]
        if self.weight._version != self.version:
            return super().forward(input)
        return self.product(input)


@torch.no_grad()
def prepack(module: nn.Module) -> None:
    """Lay out the weights of all linear layers in `module` for a CPU, if they are on one, in float32.

    It takes up to one and a half times the memory that they do; where there is not plenty of it left, they stay as they
    are.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _is_to_do(layer)]
    free = free_bytes(torch.device("cpu"))
    size = 1.5 * sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or (free is not None and size > _SHARE * free):
        return
    for layer in layers:
        many, few = _by_onednn(layer.weight, layer.bias), _by_half(layer.weight, layer.bias)
        product = many if few is None else _by_rows(few, many)
        vars(layer).update(
            product=product, halved=few is not None, version=layer.weight._version, number=next(_numbers)
        )
        layer.__class__ = PrepackedLinear
        _layers[layer.number] = layer  # type: ignore[assignment,index]


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


def halved_weights(module: nn.Module) -> int:
    """Weights in `module` that a step reads as fp16 instead of fp32."""
    return sum(
        layer.weight.numel() for layer in module.modules() if isinstance(layer, PrepackedLinear) and layer.halved
    )


def _is_to_do(layer: nn.Linear) -> bool:
    """Whether it is as PyTorch has it, or has changed since it was prepacked; quantised ones are of other kinds."""
    if isinstance(layer, PrepackedLinear):
        return layer.weight._version != layer.version
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    if layer.out_features == 1:
        return False  # nothing to lay out
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _by_half(weight: Tensor, bias: Tensor | None) -> Product | None:
    """By FBGEMM with weights of fp16, if these are exactly the weights."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    scale = 2.0 ** (_HALF_EXPONENT - int(torch.frexp(weight.abs().amax()).exponent))
    scaled = weight * scale
    packed = torch.ops.quantized.linear_prepack_fp16(scaled, None if bias is None else bias * scale)
    if not torch.equal(torch.ops.quantized.linear_unpack_fp16(packed)[0], scaled):
        return None
    return lambda rows: torch.ops.quantized.linear_dynamic_fp16.default(rows, packed).mul_(1.0 / scale)


def _by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    small = weight.numel() < _SMALL

    def product(rows: Tensor) -> Tensor:
        if small and rows.numel() == rows.shape[-1]:
            return nn.functional.linear(rows, weight, bias)
        return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]

    return product


def _by_rows(few: Product, many: Product) -> Product:
    return lambda rows: few(rows) if rows.numel() <= _FEW * rows.shape[-1] else many(rows)


# A compiler can neither see nor call such a product: it calls an operator that finds it by the layer's number.
_numbers = count()
_layers: WeakValueDictionary[int, PrepackedLinear] = WeakValueDictionary()
_library = torch.library.Library("drafter", "DEF")
_library.define("prepacked_linear(Tensor rows, int layer, int width) -> Tensor")
_library.impl("prepacked_linear", lambda rows, layer, width: _layers[layer].product(rows), "CPU")
torch.library.register_fake(
    "drafter::prepacked_linear", lambda rows, layer, width: rows.new_empty(*rows.shape[:-1], width)
)

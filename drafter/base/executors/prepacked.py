"""Linear layers on a CPU whose weights are laid out once, for the kernels that are fastest there.

A product of a few rows, which is what decoding and verification are made of, takes as long as its weights take to be
read. Which kernel comes closest to that depends on the processor and on the size of the matrix: MKL, which PyTorch
asks, may lay the weights out anew in every call, and other libraries take longer to be called than a small product
takes. So the ways to compute one are timed on the weights that are there, once for each shape in a process.

Weights of fp32 that came from a checkpoint of half the precision, as most do, may be read as fp16 where that loses
nothing: times a power of two, which is taken out of the product again. Sums and activations are fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.devices import free_bytes

_SHARE = 0.5
"""Of the memory that is left, what further copies of the weights may take."""
_FEW = 32
"""Rows up to which a product takes as long as its weights take to be read, more or less."""
_TIMED_FEW, _TIMED_MANY = (1, 5, 17), (96,)
"""Rows whose products are timed, of few and of many."""
_TIMED_WEIGHTS = 1 << 22
"""Numbers in the layers that take turns while their shape is timed: those of a model do not stay in a core's cache."""
_REPEATS, _ENOUGH = 5, 0.05
"""Of each timing, unless it has taken so many seconds; the fastest counts, as nothing else has disturbed it."""
_SMALL = 1 << 14
"""Numbers in a matrix below which it stays as it is: there is nothing to gain."""
_WORTH = 1.05
"""How much faster than as they are weights must be to be laid out again."""
_HALF_EXPONENT = 15
"""Of the largest weight in fp16, so that the smallest ones, too, are numbers that it has."""


@dataclass(frozen=True)
class Product:
    """Rows times the weights of a layer, in one of the ways to compute that.

    Args:
        of: From rows `[..., in_features]` to `[..., out_features]`.
        own: The weights, `[out_features, in_features]`, if PyTorch's own operator is asked.
        halved: Whether the weights are read as fp16.
    """

    of: Callable[[Tensor], Tensor]
    own: Tensor | None = None
    halved: bool = False


Way = Callable[[Tensor, Tensor | None], Product]
"""From weights and bias to the product by them."""


class PrepackedLinear(nn.Linear):
    """A linear layer that `prepack` has made ready. With gradients or autocast it computes as PyTorch does."""

    few: Product
    many: Product
    version: int
    """Of the weights that the products have; when they have changed since they are not used."""
    number: int
    """Of the layer, in compiled code."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., out_features]` of `[..., in_features]`."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or input.dim() < 2 or not input.numel():
            return super().forward(input)
        if torch.compiler.is_compiling():
            if self.few.own is not None:
                return F.linear(input, self.few.own, self.bias)
            return torch.ops.drafter.prepacked_linear.default(input, self.number, self.out_features)  # type: ignore[no-any-return]
        if self.weight._version != self.version:
            return super().forward(input)
        return self.product(input)

    def product(self, rows: Tensor) -> Tensor:
        """The product of rows, few or many."""
        return (self.few if rows.numel() <= _FEW * self.in_features else self.many).of(rows)


def product_of(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a layer computes without gradients, of weights that change no more: nothing of that is asked anew."""
    return layer.product if isinstance(layer, PrepackedLinear) else layer


@torch.no_grad()
def prepack(module: nn.Module) -> None:
    """Lay out the weights of all linear layers in `module` for a CPU, if they are on one, in float32.

    It takes up to twice the memory that they do; where there is not plenty of it left, they stay as they are.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _is_to_do(layer)]
    free = free_bytes(torch.device("cpu"))
    size = 2 * sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or (free is not None and size > _SHARE * free):
        return
    alike: dict[_Kind, list[nn.Linear]] = {}
    for layer in layers:
        alike.setdefault(_kind(layer), []).append(layer)
    for kind, some in alike.items():
        if kind not in _fastest:
            _fastest[kind] = _fastest_ways(kind, some)
        for layer in some:
            _lay_out(layer, *_fastest[kind])


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
        layer.weight.numel() for layer in module.modules() if isinstance(layer, PrepackedLinear) and layer.few.halved
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


def _lay_out(layer: nn.Linear, for_few: Way, for_many: Way) -> None:
    few = for_few(layer.weight, layer.bias)
    many = few if for_many is for_few else for_many(layer.weight, layer.bias)
    vars(layer).update(few=few, many=many, version=layer.weight._version, number=next(_numbers))
    layer.__class__ = PrepackedLinear
    _layers[layer.number] = layer  # type: ignore[assignment,index]


# ---- ways to compute a product


def _as_it_is(weight: Tensor, bias: Tensor | None) -> Product:
    return Product(lambda rows: F.linear(rows, weight, bias), own=weight)


def _by_columns(weight: Tensor, bias: Tensor | None) -> Product:
    """Weights column by column: what MKL may have to bring about in every call otherwise."""
    return _as_it_is(weight.T.contiguous().T, bias)


def _by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return Product(lambda rows: torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], ""))


def _by_half(weight: Tensor, bias: Tensor | None) -> Product:
    """By FBGEMM with weights of fp16, which must be exactly the weights."""
    scale = _half_scale(weight)
    packed = torch.ops.quantized.linear_prepack_fp16(weight * scale, None if bias is None else bias * scale)
    return Product(
        lambda rows: torch.ops.quantized.linear_dynamic_fp16.default(rows, packed).mul_(1.0 / scale), halved=True
    )


def _half_scale(weight: Tensor) -> float:
    """The power of two that makes the largest weight a large number of fp16."""
    return 2.0 ** (_HALF_EXPONENT - int(torch.frexp(weight.abs().amax()).exponent))


def _fits_half(weight: Tensor) -> bool:
    """Whether nothing is lost when the weights, times a power of two, become fp16."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    scaled = weight * _half_scale(weight)
    return torch.equal(scaled.half().float(), scaled)


# ---- which of them is the fastest


@dataclass(frozen=True)
class _Kind:
    """Layers for which the same ways are the fastest."""

    inputs: int
    outputs: int
    bias: bool
    fits_half: bool
    threads: int


def _kind(layer: nn.Linear) -> _Kind:
    bias, fits_half = layer.bias is not None, _fits_half(layer.weight)
    return _Kind(layer.in_features, layer.out_features, bias, fits_half, torch.get_num_threads())


def _fastest_ways(kind: _Kind, layers: Sequence[nn.Linear]) -> tuple[Way, Way]:
    """For few rows and for many: what takes the least, relative to the best, over the counts that are timed."""
    if kind.inputs * kind.outputs < _SMALL:
        return _as_it_is, _as_it_is
    layers = layers[: max(1, _TIMED_WEIGHTS // layers[0].weight.numel())]
    ways = [_as_it_is, _by_columns, _by_onednn, *([_by_half] if kind.fits_half else [])]
    products = [[way(layer.weight, layer.bias) for layer in layers] for way in ways]

    def fastest(counts: Sequence[int]) -> Way:
        times = torch.tensor(
            [[_seconds(some, torch.ones(count, kind.inputs)) for count in counts] for some in products]
        )
        times[0] /= _WORTH
        return ways[int((times / times.amin(0)).sum(1).argmin())]

    return fastest(_TIMED_FEW), fastest(_TIMED_MANY)


def _seconds(products: Sequence[Product], rows: Tensor) -> float:
    """Of all of them, one after the other."""
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH:
        start = time.perf_counter()
        for product in products:
            product.of(rows)
        times.append(time.perf_counter() - start)
    return min(times)


# What has been found, so that a process computes alike whatever it loads, and whenever.
_fastest: dict[_Kind, tuple[Way, Way]] = {}

# A compiler can neither see nor call such a product: it calls an operator that finds it by the layer's number.
_numbers = count()
_layers: WeakValueDictionary[int, PrepackedLinear] = WeakValueDictionary()
_library = torch.library.Library("drafter", "DEF")
_library.define("prepacked_linear(Tensor rows, int layer, int width) -> Tensor")
_library.impl("prepacked_linear", lambda rows, layer, width: _layers[layer].product(rows), "CPU")
torch.library.register_fake(
    "drafter::prepacked_linear", lambda rows, layer, width: rows.new_empty(*rows.shape[:-1], width)
)

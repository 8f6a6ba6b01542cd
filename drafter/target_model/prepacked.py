"""CPU linear layers whose weights are laid out once for the fastest kernel.

A product of a few rows takes as long as reading the weights, and the fastest kernel depends on processor and shape: all
are timed on the actual weights. fp32 weights are read as fp16, scaled by a power of two, where that loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.devices import free_bytes

_MEMORY_SHARE = 0.5  # largest share of the free memory that copies of the weights may take
_FEW = 32  # largest number of rows for which a product is bound by reading its weights
_TIMED_FEW, _TIMED_MANY = (1, 5, 17), (96,)  # numbers of rows that are timed: few, and many
_TIMED_WEIGHTS = 1 << 22
"""Weights that are timed in turn, so that they do not stay in a core's cache; a model's do not, either."""
_REPEATS, _ENOUGH = 5, 0.05
"""A product is timed this often, or for this many seconds. The minimum counts, as other load can only add to it."""
_SMALL = 1 << 14  # smaller matrices are left as they are: there is nothing to gain
_WORTH = 1.05  # speedup from which weights are laid out again
_HALF_EXPONENT = 15  # exponent of the largest weight in fp16; high, so that small weights are exact, too


@dataclass(frozen=True)
class Product:
    """A kernel bound to the weights of a layer."""

    of: Callable[[Tensor], Tensor]  # maps rows `[..., in_features]` to `[..., out_features]`
    own: Tensor | None = None  # the weights `[out_features, in_features]` if PyTorch's own operator multiplies
    halved: bool = False  # the weights are read as fp16


Way = Callable[[Tensor, Tensor | None], Product]  # binds a kernel to weights and bias


class PrepackedLinear(nn.Linear):
    """A linear layer laid out by `prepack`. With gradients or autocast it computes as PyTorch does."""

    few: Product
    many: Product
    version: int  # of the weights that the products were made of; those of changed weights are not used
    number: int  # key of this layer in the table that compiled code uses

    def forward(self, input: Tensor) -> Tensor:
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
        """Multiply rows `[..., in_features]`, without checks."""
        return (self.few if rows.numel() <= _FEW * self.in_features else self.many).of(rows)


@torch.no_grad()
def prepack(module: nn.Module, but: Sequence[nn.Module] = ()) -> None:
    """Lay out the weights of all fp32 linear layers on a CPU in `module`, but of those that are laid out already.

    Those in the modules `but` stay as they are.

    This takes up to twice the memory of the weights. If too little memory is free, the layers stay as they are.
    """
    others = {layer for one in but for layer in one.modules()}
    within = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and layer not in others]
    layers = [layer for layer in within if _is_to_do(layer)]
    for layer in layers:
        if isinstance(layer, PrepackedLinear):  # its weights have changed: the copies of the old ones are freed first
            del layer.few, layer.many
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    free = free_bytes(torch.device("cpu"))
    size = 2 * sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or (free is not None and size > _MEMORY_SHARE * free):
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
    """Undo prepacking in `module` within a `with` block."""
    layers = [layer for layer in module.modules() if type(layer) is PrepackedLinear]
    for layer in layers:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = PrepackedLinear


def halved_weights(module: nn.Module) -> int:
    """Count the weights in `module` that a step reads as fp16 instead of fp32."""
    return sum(
        layer.weight.numel() for layer in module.modules() if isinstance(layer, PrepackedLinear) and layer.few.halved
    )


def _is_to_do(layer: nn.Linear) -> bool:
    if isinstance(layer, PrepackedLinear):
        return layer.weight._version != layer.version
    if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    if layer.out_features == 1:
        return False  # One row of weights has only one layout.
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _lay_out(layer: nn.Linear, for_few: Way, for_many: Way) -> None:
    few = for_few(layer.weight, layer.bias)
    many = few if for_many is for_few else for_many(layer.weight, layer.bias)
    vars(layer).update(few=few, many=many, version=layer.weight._version, number=next(_numbers))
    layer.__class__ = PrepackedLinear
    _layers[layer.number] = layer  # type: ignore[assignment,index]


def _as_it_is(weight: Tensor, bias: Tensor | None) -> Product:
    return Product(lambda rows: F.linear(rows, weight, bias), own=weight)


def _by_columns(weight: Tensor, bias: Tensor | None) -> Product:
    """Store the weights by columns, as MKL may otherwise reorder them in every call."""
    return _as_it_is(weight.T.contiguous().T, bias)


def _by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return Product(lambda rows: torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], ""))


def _by_half(weight: Tensor, bias: Tensor | None) -> Product:
    """Multiply with FBGEMM by fp16 weights, which must be exact; see `_fits_half`."""
    scale = _half_scale(weight)
    packed = torch.ops.quantized.linear_prepack_fp16(weight * scale, None if bias is None else bias * scale)
    return Product(
        lambda rows: torch.ops.quantized.linear_dynamic_fp16.default(rows, packed).mul_(1.0 / scale), halved=True
    )


def _half_scale(weight: Tensor) -> float:
    return 2.0 ** (_HALF_EXPONENT - int(torch.frexp(weight.abs().amax()).exponent))


def _fits_half(weight: Tensor) -> bool:
    """Return whether the weights, times a power of two, are exact in fp16."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    scaled = weight * _half_scale(weight)
    return torch.equal(scaled.half().float(), scaled)


class _Kind(NamedTuple):
    inputs: int
    outputs: int
    bias: bool
    fits_half: bool
    threads: int


def _kind(layer: nn.Linear) -> _Kind:
    bias, fits_half = layer.bias is not None, _fits_half(layer.weight)
    return _Kind(layer.in_features, layer.out_features, bias, fits_half, torch.get_num_threads())


def _fastest_ways(kind: _Kind, layers: Sequence[nn.Linear]) -> tuple[Way, Way]:
    """Return the kernels for few and for many rows with the least sum of times relative to the best."""
    if kind.inputs * kind.outputs < _SMALL:
        return _as_it_is, _as_it_is
    layers = layers[: max(1, _TIMED_WEIGHTS // layers[0].weight.numel())]
    ways = [_as_it_is, _by_columns, _by_onednn, *([_by_half] if kind.fits_half else [])]
    products = [[way(layer.weight, layer.bias) for layer in layers] for way in ways]

    def fastest(counts: Sequence[int]) -> Way:
        inputs = [torch.ones(count, kind.inputs, dtype=torch.float32) for count in counts]
        times = torch.tensor([[_seconds(some, one) for one in inputs] for some in products], dtype=torch.float32)
        times[0] /= _WORTH
        return ways[int((times / times.amin(0)).sum(1).argmin())]

    return fastest(_TIMED_FEW), fastest(_TIMED_MANY)


def _seconds(products: Sequence[Product], rows: Tensor) -> float:
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH:
        start = time.perf_counter()
        for product in products:
            product.of(rows)
        times.append(time.perf_counter() - start)
    return min(times)


# Kept, so that all models in a process are computed alike.
_fastest: dict[_Kind, tuple[Way, Way]] = {}

# Compiled code cannot call a Python function such as a product, so it calls an operator that finds the layer by number.
_numbers = count()
_layers: WeakValueDictionary[int, PrepackedLinear] = WeakValueDictionary()
_library = torch.library.Library("drafter", "DEF")
_library.define("prepacked_linear(Tensor rows, int layer, int width) -> Tensor")
_library.impl("prepacked_linear", lambda rows, layer, width: _layers[layer].product(rows), "CPU")
torch.library.register_fake(
    "drafter::prepacked_linear", lambda rows, layer, width: rows.new_empty(*rows.shape[:-1], width)
)

"""Weights that stay as a GGUF file stores them, where the native decoder reads them so.

A model is loaded dequantised, by transformers, and proved. Then the library's copy of its weights, in the file's own
formats, takes the place of the floating-point numbers, if it stands for the same ones to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from drafter.native.build import MatrixStruct, PackedWeights, UnsuitableError, gated_order
from drafter.native.coded import FORMATS, CodedMatrix, Stored
from drafter.target_model.blocks import FAMILIES

_log = logging.getLogger(__name__)
_COMPARED = 4096  # outputs that are compared at a time: of embeddings, all are hundreds of megabytes


def stored_weights(file: Path, model: Any) -> dict[str, Stored]:
    """Return how a GGUF file stores the weights of a model that transformers has read from it, by their names.

    Those in formats that the library does not read are left out, and those that transformers does more with than to
    put rows in another order. There are none of a model that the native decoder does not run.
    """
    if model.config.model_type not in FAMILIES:
        return {}
    import gguf  # transformers has read the file with it

    reader = gguf.GGUFReader(file)
    kind = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    if is_gguf_arch_supported(kind):  # transformers reads it in another way, which names no tensors of the file
        return {}
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=model.config.to_dict())
    names, found = get_gguf_hf_weights_map(model, processor), {}
    for tensor in reader.tensors:
        if tensor.tensor_type not in FORMATS or tensor.name not in names or tensor.data.ndim != 2:
            continue
        rows = np.arange(len(tensor.data))[:, None]
        moved = processor.process(weights=rows, name=tensor.name, tensor_key_mapping=names, parsed_parameters={})
        if moved.name == tensor.name and np.array_equal(np.sort(moved.weights, axis=0), rows):
            order = torch.from_numpy(np.ascontiguousarray(moved.weights[:, 0]))
            found[names[tensor.name]] = Stored(int(tensor.tensor_type), tensor.data, order)
    return found


class CodedWeight(Tensor):
    """Weights `[outputs, inputs]` of a layer, of which only the library's copy exists.

    Products, and rows of an embedding, are computed from that; whatever else is asked of it gets fp32 numbers that are
    made for the occasion. They cannot be changed.
    """

    matrix: CodedMatrix
    places: Tensor  # columns of the outputs
    whole: bool  # whether these are all of the columns, in their order

    @staticmethod
    def __new__(cls, matrix: CodedMatrix, places: Tensor) -> CodedWeight:
        shape = (len(places), matrix.inputs)
        on = {"dtype": torch.float32, "device": torch.device("cpu")}
        made: CodedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, **on)  # type: ignore[arg-type]
        made.matrix, made.places = matrix, places
        made.whole = torch.equal(places, torch.arange(matrix.outputs))
        return made

    def expanded(self) -> Tensor:
        """Return the weights in fp32."""
        return self.matrix.expanded(self.places)

    def stands_for(self, weight: Tensor) -> bool:
        """Return whether these are the same numbers."""
        parts = zip(self.places.split(_COMPARED), weight.split(_COMPARED), strict=True)
        return all(torch.equal(self.matrix.expanded(places), part) for places, part in parts)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            weight = args[1]
            return weight.matrix.expanded(weight.places[args[0]])
        if func is F.linear and _is_plain(*args[:2]):
            rows, weight, bias = (*args, None)[:3]
            product = weight.matrix.product(rows)
            return product if bias is None else product.add_(bias)
        with torch._C.DisableTorchFunctionSubclass():  # what comes of weights is a plain tensor
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].matrix, args[0].places)
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise RuntimeError("these weights are kept as their file stores them, and cannot be changed")
        args, kwargs = tree_map(lambda one: one.expanded() if isinstance(one, cls) else one, (args, kwargs or {}))
        return func(*args, **kwargs)


class LinearWeights:
    """Lays out a decoder's linear layers for the library, as they are stored where that is known, or else as they are.

    Args:
        weights: Keeps what is laid out.
        stored: How weights are stored.

    Attributes:
        coded: What may take the place of weights.

    Methods raise `UnsuitableError` for layers that are not plain linear layers in fp32 on a CPU.
    """

    def __init__(self, weights: PackedWeights, stored: Mapping[nn.Parameter, Stored]) -> None:
        self._weights, self._stored = weights, stored
        self.coded: dict[Tensor, CodedWeight] = {}

    def matrix(self, layers: Sequence[Any], order: Tensor | None = None) -> MatrixStruct:
        """Lay out layers with the same inputs, one behind another, or in another order of their outputs."""
        return self._coded(layers, order) or self._weights.matrix(*_joined(layers), order)

    def gated(self, layers: Sequence[Any]) -> MatrixStruct:
        """Lay out the first matrix `[2 m, d]` of a gated MLP, whose first half is the gate."""
        order = gated_order(sum(len(layer.weight) for layer in layers) // 2)
        return self._coded(layers, order) or self._weights.gated(*_joined(layers))

    def after_gate(self, layer: Any) -> MatrixStruct:
        """Lay out the second matrix `[d, m]` of a gated MLP."""
        return self._coded([layer]) or self._weights.after_gate(*_joined([layer]))

    def table(self, embedding: nn.Embedding) -> MatrixStruct | None:
        """Lay out embeddings as outputs, if it is known how they are stored; a tied LM head is that already."""
        tied = self.coded.get(embedding.weight)
        return self._coded([embedding]) if tied is None else tied.matrix.struct(bias=False)

    def _coded(self, layers: Sequence[Any], order: Tensor | None = None) -> MatrixStruct | None:
        """Return layers as they are stored; None if that is not known, or would stand for other numbers."""
        parts = [self._stored[layer.weight] for layer in layers if layer.weight in self._stored]
        if len(parts) < len(layers):
            return None
        try:
            matrix = CodedMatrix(parts, _bias_of(layers), order)
        except UnsuitableError as reason:
            _log.debug("weights are kept in fp32: %s", reason)
            return None
        made = [CodedWeight(matrix, places) for places in matrix.places]
        if any(not one.stands_for(layer.weight) for one, layer in zip(made, layers, strict=True)):
            _log.warning("weights are kept in fp32: as they are stored, they would stand for other numbers")
            return None
        self.coded |= {layer.weight: one for layer, one in zip(layers, made, strict=True)}
        self._weights.keep(matrix)
        return matrix.struct()


def keep_coded(model: nn.Module, coded: dict[Tensor, CodedWeight]) -> None:
    """Let a model have coded weights in place of those that they stand for, which are freed."""
    made = {weight: nn.Parameter(one, requires_grad=False) for weight, one in coded.items()}
    coded.clear()
    _replace(model, made.get)


def restore(model: nn.Module) -> None:
    """Let a model have its weights in fp32 again, for its own code."""
    made: dict[Tensor, nn.Parameter] = {}

    def expanded(weight: Tensor) -> nn.Parameter | None:
        if isinstance(weight, CodedWeight) and weight not in made:
            made[weight] = nn.Parameter(weight.expanded(), requires_grad=False)
        return made.get(weight)

    _replace(model, expanded)


def share_of_coded(model: nn.Module) -> float:
    """Return which share of a model's matrices of weights is coded."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    return sum(isinstance(weight, CodedWeight) for weight in matrices) / max(1, len(matrices))


def _replace(model: nn.Module, other: Callable[[Tensor], nn.Parameter | None]) -> None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and (made := other(weight)) is not None:
            module.weight = made


def _is_plain(rows: Tensor, weight: Tensor) -> bool:
    """Return whether the library computes a product: with the whole of a matrix, in fp32, and without gradients."""
    return (
        isinstance(weight, CodedWeight)
        and weight.whole
        and rows.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and rows.requires_grad)
    )


def _joined(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Stack weights `[outputs, inputs]` and biases `[outputs]` of linear layers with the same input."""
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise UnsuitableError(f"{type(layer).__name__} stands where a linear layer is expected")
    return torch.cat([layer.weight.detach() for layer in layers]), _bias_of(layers)


def _bias_of(layers: Sequence[Any]) -> Tensor | None:
    biases = [getattr(layer, "bias", None) for layer in layers]  # embeddings have none
    if all(bias is None for bias in biases):
        return None
    if any(bias is None for bias in biases):
        raise UnsuitableError("some of its query, key and value layers have a bias, and others have none")
    return torch.cat([bias.detach() for bias in biases if bias is not None])

"""`ctypes` bindings of the compiled library: structures as its sources declare them, functions, packed weights."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.devices import Pieces
from drafter.native.build import library_path

Pointer = ctypes.c_void_p
_I64, _I32, _F32 = ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class MatrixStruct(ctypes.Structure):
    """`Matrix` of products.h."""

    _fields_ = (
        ("weights", Pointer),
        ("bias", Pointer),
        ("inputs", _I64),
        ("outputs", _I64),
        ("half", _I32),
        ("unused", _I32),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_ = (
        ("attention_norm", Pointer),
        ("mlp_norm", Pointer),
        ("query_norm", Pointer),
        ("key_norm", Pointer),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    )


class DecoderStruct(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("embedding", Pointer),
        ("final_norm", Pointer),
        ("head", MatrixStruct),
        ("cosines", Pointer),
        ("sines", Pointer),
        ("positions", _I64),
        ("hidden", _I64),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("head_size", _I64),
        ("intermediate", _I64),
        ("vocabulary", _I64),
        ("epsilon", _F32),
        ("scale", _F32),
    )


class ForwardStruct(ctypes.Structure):
    """`Forward` of decoder.cpp."""

    _fields_ = (
        ("keys", ctypes.POINTER(Pointer)),
        ("values", ctypes.POINTER(Pointer)),
        ("blocks", Pointer),
        ("block", _I64),
        ("slot_blocks", _I64),
        ("first_slot", _I64),
        ("rows", _I64),
        ("nodes", _I64),
        ("tokens", Pointer),
        ("lengths", Pointer),
        ("depths", Pointer),
        ("ancestors", Pointer),
        ("which", Pointer),
        ("count", _I64),
        ("taps", Pointer),
        ("tap_count", _I64),
        ("hidden", Pointer),
        ("logits", Pointer),
        ("logits_from", _I64),
        ("layers", _I64),
        ("threads", _I64),
    )


class JointLayerStruct(ctypes.Structure):
    """`JointLayer` of joint.h."""

    _fields_ = (
        ("norm_weight", Pointer),
        ("norm_bias", Pointer),
        ("inner", MatrixStruct),
        ("out", MatrixStruct),
    )


class JointStruct(ctypes.Structure):
    """`Joint` of joint.h."""

    _fields_ = (
        ("frames", MatrixStruct),
        ("out", MatrixStruct),
        ("layers", ctypes.POINTER(JointLayerStruct)),
        ("norm_weight", Pointer),
        ("norm_bias", Pointer),
        ("blank_weight", Pointer),
        ("blank_bias", Pointer),
        ("head", MatrixStruct),
        ("layer_count", _I64),
        ("terms", _I64),
        ("hidden", _I64),
    )


class LabelTableStruct(ctypes.Structure):
    """`LabelTable` of lattice.cpp."""

    _fields_ = (
        ("drafted", Pointer),
        ("recent", Pointer),
        ("places", _I64),
        ("tokens", _I64),
        ("texts", _I64),
    )


class SearchStruct(ctypes.Structure):
    """`Search` of lattice.cpp."""

    _fields_ = (
        ("labels", LabelTableStruct),
        ("states", Pointer),
        ("rows", _I64),
        ("frames", _I64),
        ("band", _I64),
        ("depth", _I64),
        ("size", _I64),
        ("beam", _I64),
        ("least", _F32),
        ("unused", _F32),
        ("pending", Pointer),
        ("tokens", Pointer),
        ("parents", Pointer),
        ("depths", Pointer),
        ("log_probs", Pointer),
        ("threads", _I64),
    )


class LayerNormStruct(ctypes.Structure):
    """`LayerNorm` of frames.cpp."""

    _fields_ = (("weight", Pointer), ("bias", Pointer))


class FrameLayerStruct(ctypes.Structure):
    """`FrameLayer` of frames.cpp."""

    _fields_ = (
        ("attention_norm", LayerNormStruct),
        ("mlp_norm", LayerNormStruct),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    )


class FrameLayersStruct(ctypes.Structure):
    """`FrameLayers` of frames.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(FrameLayerStruct)),
        ("embedding_norm", LayerNormStruct),
        ("hidden_norm", LayerNormStruct),
        ("fusion", MatrixStruct),
        ("slots", Pointer),
        ("cosines", Pointer),
        ("sines", Pointer),
        ("layer_count", _I64),
        ("width", _I64),
        ("heads", _I64),
        ("head_size", _I64),
        ("intermediate", _I64),
        ("scale", _F32),
        ("unused", _F32),
    )


class FramesStruct(ctypes.Structure):
    """`Frames` of frames.cpp."""

    _fields_ = (
        ("cache", Pointer),
        ("slots", _I64),
        ("length", _I64),
        ("embeddings", Pointer),
        ("hidden", Pointer),
        ("hidden_stride", _I64),
        ("slot", Pointer),
        ("position", Pointer),
        ("entries", _I64),
        ("ends", Pointer),
        ("rows", _I64),
        ("frames", _I64),
        ("states", Pointer),
        ("threads", _I64),
    )


@cache
def library() -> ctypes.CDLL:
    """Load the library, once per process; compile it if the cache has none.

    Raises:
        BuildError: It cannot be compiled here.
    """
    loaded = ctypes.CDLL(str(library_path()))
    loaded.drafter_lanes.restype = ctypes.c_int64
    loaded.drafter_takes_heads_of.restype = ctypes.c_int32
    loaded.drafter_takes_heads_of.argtypes = [ctypes.c_int64]
    loaded.drafter_packed_bytes.restype = ctypes.c_int64
    loaded.drafter_packed_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    loaded.drafter_pack.restype = None
    loaded.drafter_pack.argtypes = [Pointer, ctypes.c_int64, Pointer, ctypes.c_int64, ctypes.c_int32, Pointer]
    loaded.drafter_forward.restype = ctypes.c_int32
    loaded.drafter_forward.argtypes = [ctypes.POINTER(DecoderStruct), ctypes.POINTER(ForwardStruct)]
    loaded.drafter_search.restype = None
    loaded.drafter_search.argtypes = [ctypes.POINTER(JointStruct), ctypes.POINTER(SearchStruct)]
    loaded.drafter_frames.restype = None
    loaded.drafter_frames.argtypes = [ctypes.POINTER(FrameLayersStruct), ctypes.POINTER(FramesStruct)]
    return loaded


class UnsuitableError(Exception):
    """The library cannot compute with these weights; the message says why."""


def _suitable(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise UnsuitableError(f"it has {tensor.dtype} on {tensor.device}, not float32 on a CPU")
    return tensor.detach().contiguous()


_PIECES = Pieces()


class PackedMatrix:
    """Weights of a linear layer, packed for the library.

    Weights that are exact in bf16, as those of most checkpoints are, are kept in bf16, which halves the bytes to read.
    (Except with an odd number of inputs, as the weights of two inputs are stored together.)

    Args:
        weight: `[outputs, inputs]` fp32 on a CPU.
        bias: `[outputs]` or None.
        order: Output of each column, -1 for none; by default all outputs in their order.

    Raises:
        UnsuitableError: The weights are of another kind.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        weight = _suitable(weight)
        outputs, self.inputs = weight.shape
        order = torch.arange(outputs) if order is None else order.contiguous()
        self.outputs = len(order)
        self.half = self.inputs % 2 == 0 and torch.equal(weight.bfloat16().float(), weight)
        size = library().drafter_packed_bytes(self.outputs, self.inputs, self.half)
        self._packed = _PIECES.take(size)
        library().drafter_pack(
            weight.data_ptr(), self.inputs, order.data_ptr(), self.outputs, self.half, self._packed.data_ptr()
        )
        self._bias: Tensor | None = None
        if bias is not None:
            width = 2 * library().drafter_lanes()
            self._bias = torch.zeros(-(-self.outputs // width) * width, dtype=torch.float32)
            self._bias[: self.outputs] = torch.where(order >= 0, _suitable(bias)[order.clamp_min(0)], 0)

    def struct(self) -> MatrixStruct:
        """Return the library's view, valid as long as this object lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return MatrixStruct(self._packed.data_ptr(), bias, self.inputs, self.outputs, self.half, 0)


def gated_order(size: int) -> Tensor:
    """Return the column order in which blocks of a gate alternate with those of the `size` outputs that it gates."""
    lanes = library().drafter_lanes()
    columns = torch.arange(-(-size // lanes) * lanes).view(-1, 1, lanes)
    both = torch.cat([columns, columns + size], 1)
    return torch.where(columns < size, both, -1).flatten()


class PackedWeights:
    """Keeps weights alive for the library. Methods raise what `PackedMatrix` does."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def matrix(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> MatrixStruct:
        """Pack a matrix; see `PackedMatrix`."""
        packed = PackedMatrix(weight, bias, order)
        self._kept.append(packed)
        return packed.struct()

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> MatrixStruct:
        """Pack the first matrix `[2 m, d]` of a gated MLP, whose first half is the gate."""
        return self.matrix(weight, bias, gated_order(len(weight) // 2))

    def after_gate(self, weight: Tensor, bias: Tensor | None = None) -> MatrixStruct:
        """Pack the second matrix `[d, m]` of a gated MLP, with zero inputs up to whole vectors."""
        return self.matrix(F.pad(weight, (0, -weight.shape[1] % library().drafter_lanes())), bias)

    def address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's data; None for None."""
        if tensor is None:
            return None
        tensor = _suitable(tensor)
        self._kept.append(tensor)
        return tensor.data_ptr()

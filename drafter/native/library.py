"""The compiled library as Python sees it: its structures and functions, and weights laid out for it."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

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
        ("layer_count", _I64),
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
        ("capacity", _I64),
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
        ("threads", _I64),
    )


class JointLayerStruct(ctypes.Structure):
    """`JointLayer` of joint.cpp."""

    _fields_ = (
        ("norm_weight", Pointer),
        ("norm_bias", Pointer),
        ("inner", MatrixStruct),
        ("out", MatrixStruct),
    )


class JointStruct(ctypes.Structure):
    """`Joint` of joint.cpp."""

    _fields_ = (
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


class ScoreStruct(ctypes.Structure):
    """`Score` of joint.cpp."""

    _fields_ = (
        ("frame_states", Pointer),
        ("frame_terms", Pointer),
        ("state_stride", _I64),
        ("term_stride", _I64),
        ("rows", Pointer),
        ("label_terms", Pointer),
        ("count", _I64),
        ("shares", Pointer),
        ("blanks", Pointer),
        ("threads", _I64),
    )


@cache
def library() -> ctypes.CDLL:
    """Return the library; the first call in a process loads it, and compiles it if that was never done.

    Raises:
        BuildError: It cannot be compiled here.
    """
    loaded = ctypes.CDLL(str(library_path()))
    loaded.drafter_lanes.restype = _I64
    loaded.drafter_takes_heads_of.restype = _I32
    loaded.drafter_takes_heads_of.argtypes = [_I64]
    loaded.drafter_packed_bytes.restype = _I64
    loaded.drafter_packed_bytes.argtypes = [_I64, _I64, _I32]
    loaded.drafter_pack.restype = None
    loaded.drafter_pack.argtypes = [Pointer, _I64, Pointer, _I64, _I32, Pointer]
    loaded.drafter_forward.restype = _I32
    loaded.drafter_forward.argtypes = [ctypes.POINTER(DecoderStruct), ctypes.POINTER(ForwardStruct)]
    loaded.drafter_score.restype = None
    loaded.drafter_score.argtypes = [ctypes.POINTER(JointStruct), ctypes.POINTER(ScoreStruct)]
    return loaded


class PackedMatrix:
    """Weights of a linear layer, laid out for the library.

    Weights that are exact in bf16, as those of most checkpoints are, are kept in bf16: half as many bytes to read.

    Args:
        weight: `[outputs, inputs]` fp32 on a CPU.
        bias: `[outputs]` or None.
        order: Which output each column holds, -1 for none; by default all outputs in their order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        outputs, self.inputs = weight.shape
        order = torch.arange(outputs) if order is None else order.contiguous()
        self.outputs = len(order)
        self.half = torch.equal(weight.bfloat16().float(), weight)
        size = library().drafter_packed_bytes(self.outputs, self.inputs, self.half)
        self._packed = torch.empty(size, dtype=torch.uint8)
        library().drafter_pack(
            weight.data_ptr(), self.inputs, order.data_ptr(), self.outputs, self.half, self._packed.data_ptr()
        )
        self._bias: Tensor | None = None
        if bias is not None:
            width = 2 * library().drafter_lanes()
            self._bias = torch.zeros(-(-self.outputs // width) * width)
            self._bias[: self.outputs] = torch.where(order >= 0, bias.detach()[order.clamp_min(0)], 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the laid out weights."""
        return self._packed.nbytes

    def struct(self) -> MatrixStruct:
        """Return the library's view of it, which is valid as long as this object lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return MatrixStruct(self._packed.data_ptr(), bias, self.inputs, self.outputs, self.half, 0)


def gated_order(size: int) -> Tensor:
    """Return the order of columns in which a gate and what it gates share a block.

    Args:
        size: Outputs of the gate; those that it gates follow them.
    """
    lanes = library().drafter_lanes()
    columns = torch.arange(-(-size // lanes) * lanes).view(-1, 1, lanes)
    both = torch.cat([columns, columns + size], 1)
    return torch.where(columns < size, both, -1).flatten()

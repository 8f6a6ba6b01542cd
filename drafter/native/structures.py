"""The structures of the compiled library, field by field as its sources declare them."""

from __future__ import annotations

import ctypes

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

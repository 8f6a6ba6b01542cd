"""Bindings of the C++ library's mixers: recurrent layers over prompts and draft trees."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from drafter.native.build import MatrixStruct, Pointer, declared, fields, library

_I64, _I32, _F32 = ctypes.c_int64, ctypes.c_int32, ctypes.c_float
DELTA, MAMBA, SELECTIVE, PLAIN = range(4)  # rules by which states of heads change; without heads the last

# Structures of the same names, without `Struct`, in `source/mixer.h` and `source/texts.h`.


class MixerStruct(ctypes.Structure):
    _fields_ = fields(
        (MatrixStruct, "inside out select step"),
        (Pointer, "taps taps_bias decays step_bias skip norm select_norms"),
        (_I64, "key_heads heads key_size value_size reach channels query_at key_at value_at normed gate_first"),
        (_F32, "epsilon rate least most"),
        (_I32, "rule"),
    )


class TextsStruct(ctypes.Structure):
    _fields_ = fields(
        (_I64, "rows nodes"),
        (Pointer, "which"),
        (_I64, "count"),
        (Pointer, "parents from writes"),
        (_I64, "write_count"),
    )


class StatesStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "inputs memories"))


class KeptLayerStruct(ctypes.Structure):
    _fields_ = fields((ctypes.POINTER(MixerStruct), "mixer"), (StatesStruct, "states"), (Pointer, "kept"))


class AcceptedStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "path"), (_I64, "rows nodes length"), (Pointer, "from to"))


@cache
def _functions() -> ctypes.CDLL:
    mixer, states = ctypes.POINTER(MixerStruct), ctypes.POINTER(StatesStruct)
    return declared(
        library(),
        ("kept_width", _I64, [mixer]),
        ("mix", None, [mixer, Pointer, states, *[Pointer] * 3, _I64]),
        ("keep_paths", None, [ctypes.POINTER(KeptLayerStruct), _I64, ctypes.POINTER(AcceptedStruct), _I64]),
    )


class Texts:
    """What a forward runs of B texts, each behind a state. Keeps the tensors alive, all int64 on a CPU.

    Args:
        which: `[M]` nodes that are computed, rising, as indices into the flattened `[B * N]`.
        parents: `[B, N]`, not below a node where it follows the state; None where each text is a chain.
        entries: `[B]` of the buffers, that have the states.
        writes: `[W, 3]` of chains, rising: a text, after how many of its nodes its state is kept, and the entry for it.
    """

    def __init__(
        self, rows: int, nodes: int, which: Tensor, parents: Tensor | None, entries: Tensor, writes: Tensor
    ) -> None:
        self.entries, self.rows, self.nodes, self.is_tree = entries.contiguous(), rows, nodes, parents is not None
        self._kept = which.contiguous(), None if parents is None else parents.contiguous(), writes.contiguous()
        which, parents, writes = self._kept
        self.struct = TextsStruct(
            rows,
            nodes,
            which.data_ptr(),
            len(which),
            None if parents is None else parents.data_ptr(),
            self.entries.data_ptr(),
            writes.data_ptr(),
            len(writes),
        )
        self.address = ctypes.addressof(self.struct)


@dataclass(frozen=True)
class MixerLayer:
    """A mixer over a cache.

    Args:
        inputs: `[entries, C, k]` states of its convolution.
        memories: `[entries, H, K, V]` states of its heads, if it has any.
    """

    mixer: MixerStruct
    inputs: Tensor
    memories: Tensor | None

    def states(self) -> StatesStruct:
        return StatesStruct(self.inputs.data_ptr(), None if self.memories is None else self.memories.data_ptr())

    def room(self, texts: Texts) -> Tensor:
        """Return room for what is kept of a tree's nodes until the commit; none for chains."""
        nodes = texts.rows * texts.nodes if texts.is_tree else 0
        return torch.empty(nodes, kept_width(self.mixer), dtype=torch.float32)


def kept_width(mixer: MixerStruct) -> int:
    """Return how many numbers are kept of a node until its step is committed."""
    return int(_functions().drafter_kept_width(ctypes.byref(mixer)))


def mix(layer: MixerLayer, texts: Texts, hidden: Tensor, kept: Tensor) -> Tensor:
    """Run a mixer over hidden states `[..., d]` of M nodes; return as many.

    The states of chains are written as `texts` say. Those of a tree's nodes are not: `kept` gets what they are made of.
    """
    hidden = hidden.contiguous()
    output = torch.empty_like(hidden)
    _functions().drafter_mix(
        ctypes.byref(layer.mixer),
        texts.address,
        ctypes.byref(layer.states()),
        hidden.data_ptr(),
        kept.data_ptr() or None,
        output.data_ptr(),
        torch.get_num_threads(),
    )
    return output


def keep_paths(layers: Sequence[tuple[MixerLayer, Tensor]], texts: Texts, path: Tensor, to: Tensor) -> None:
    """Write the states after accepted paths `[B, P]`, node ids that rise from 0 and then are 0, to entries `to` `[B]`.

    Args:
        layers: Each with what it has kept of the nodes.
    """
    path, to = path.contiguous(), to.contiguous()
    accepted = AcceptedStruct(
        path.data_ptr(), texts.rows, texts.nodes, path.shape[1], texts.entries.data_ptr(), to.data_ptr()
    )
    structs = (KeptLayerStruct * len(layers))(
        *(KeptLayerStruct(ctypes.pointer(layer.mixer), layer.states(), kept.data_ptr()) for layer, kept in layers)
    )
    _functions().drafter_keep_paths(structs, len(layers), ctypes.byref(accepted), torch.get_num_threads())

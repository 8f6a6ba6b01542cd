"""Weights as GGUF files store them: blocks taken apart, and laid out for the library, which expands them as it reads.

A weight is `code * scale + offset`; `source/codes.h` says what these are made of, and why nothing is rounded twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.native.build import PIECES, CodedBlockStruct, MatrixStruct, UnsuitableError, columns_of, library

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Stored:
    """A matrix of weights in a file.

    Args:
        format: One of `FORMATS`.
        blocks: `[rows, bytes of a row]`.
        rows: `[outputs]`: the row that is each of a layer's outputs.
    """

    format: int
    blocks: Bytes
    rows: Tensor


class CodedMatrix:
    """Weights of linear layers with the same inputs, one behind another, in as many bytes as they are stored in.

    Args:
        parts: Of each layer.
        bias: `[outputs]`, of all layers.
        order: Output of each column, -1 for none; by default all outputs in their order.

    Attributes:
        places: Of each layer, the columns of its outputs.

    Raises:
        UnsuitableError: The layers are stored in ways that cannot be laid out beside one another.
    """

    def __init__(self, parts: Sequence[Stored], bias: Tensor | None = None, order: Tensor | None = None) -> None:
        self._width = 2 * library().drafter_lanes()
        sizes = [len(part.rows) for part in parts]
        mixed = len({part.format for part in parts}) > 1
        if mixed and (order is not None or any(size % self._width for size in sizes[:-1])):
            raise UnsuitableError("layers that are read together are stored in different formats")
        order = torch.arange(sum(sizes)) if order is None else order
        self.outputs, self.inputs = len(order), 0
        self._laid_out: list[Tensor] = []
        blocks: list[CodedBlockStruct] = []
        for some in [[part] for part in parts] if mixed else [parts]:
            blocks += self._lay_out(some, torch.arange(len(some[0].rows)) if mixed else order)
        self._blocks = (CodedBlockStruct * len(blocks))(*blocks)
        self._bias = None if bias is None else columns_of(bias, order)
        columns = torch.empty(sum(sizes), dtype=torch.int64)
        columns[order[order >= 0]] = torch.arange(len(order))[order >= 0]
        self.places = columns.split(sizes)

    def _lay_out(self, parts: Sequence[Stored], order: Tensor) -> list[CodedBlockStruct]:
        """Lay out layers of one format; return the library's view of each block of columns."""
        format_, firsts = parts[0].format, np.cumsum([0, *(len(part.blocks) for part in parts)]).tolist()
        rows = torch.cat([part.rows + first for part, first in zip(parts, firsts, strict=False)])
        columns = torch.full((-(-len(order) // self._width) * self._width,), -1)
        columns[: len(order)] = torch.where(order >= 0, rows[order.clamp_min(0)], -1)
        form = FORMATS[format_]
        taken = [form.take(part.blocks.reshape(-1, form.size)) for part in parts]
        codes, halves, steps = (np.concatenate(some) for some in zip(*taken, strict=True))
        self.inputs = codes.size // firsts[-1]
        size, count = library().drafter_coded_bytes(format_, self.inputs), len(columns) // self._width
        piece = PIECES.take(size * count)
        self._laid_out.append(piece)
        arrays = (codes.ctypes.data, halves.ctypes.data, steps.ctypes.data)
        library().drafter_lay_out(format_, self.inputs, columns.data_ptr(), count, *arrays, piece.data_ptr())
        return [CodedBlockStruct(piece.data_ptr() + block * size, format_) for block in range(count)]

    def struct(self, *, bias: bool = True) -> MatrixStruct:
        """Return the library's view, with the bias or without, valid as long as this object lives."""
        address = None if self._bias is None or not bias else self._bias.data_ptr()
        return MatrixStruct(ctypes.addressof(self._blocks), address, self.inputs, self.outputs, 0, 1)

    def expanded(self, columns: Tensor) -> Tensor:
        """Return the fp32 weights `[..., inputs]` of columns `[...]`."""
        columns = columns.contiguous()
        weights = torch.empty(*columns.shape, self.inputs, dtype=torch.float32)
        struct = self.struct()
        library().drafter_expand(ctypes.byref(struct), columns.data_ptr(), columns.numel(), weights.data_ptr())
        return weights

    def product(self, rows: Tensor) -> Tensor:
        """Return `[..., outputs]` of fp32 rows `[..., inputs]`, without the bias."""
        rows = rows.contiguous()
        found = torch.empty(*rows.shape[:-1], self.outputs, dtype=torch.float32)
        struct, count = self.struct(bias=False), rows.numel() // self.inputs
        library().drafter_multiply(
            ctypes.byref(struct), rows.data_ptr(), count, found.data_ptr(), torch.get_num_threads()
        )
        return found


class _Taken(NamedTuple):
    """What N blocks consist of."""

    codes: Bytes  # [N, inputs]
    halves: NDArray[np.uint16]  # [N, 1 or 2] fp16, of the scale and of the offset
    steps: NDArray[np.int8]  # [N, runs, 0 to 2]: these are multiplied by, where a block has several runs


class _Format(NamedTuple):
    size: int  # bytes of a block
    take: Callable[[Bytes], _Taken]  # a block's parts, of `[N, size]`


def _halves(*parts: Bytes) -> NDArray[np.uint16]:
    return np.ascontiguousarray(np.concatenate(parts, 1)).view(np.uint16)


def _fields(data: Bytes, bits: int, width: int) -> Bytes:
    """Return fields of so many bits: the lowest of `width` bytes, then the next ones of these, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    found = (data.reshape(len(data), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)
    return found.reshape(len(data), -1).view(np.uint8)


def _plain(size: int, halves: int, codes: Callable[[Bytes], Bytes]) -> _Format:
    """Return a format with one run in a block: one or two fp16 numbers, then codes."""

    def take(blocks: Bytes) -> _Taken:
        scales = _halves(*(blocks[:, 2 * half : 2 * half + 2] for half in range(halves)))
        return _Taken(codes(blocks[:, 2 * halves :]), scales, np.empty((len(blocks), 1, 0), np.int8))

    return _Format(size, take)


def _five(data: Bytes) -> Bytes:
    """Return codes of five bits, all upper bits before the others."""
    return _fields(data[:, 4:], 4, 16) | np.unpackbits(data[:, :4], axis=1, bitorder="little") << np.uint8(4)


def _with_minimum(blocks: Bytes, codes: Bytes) -> _Taken:
    """Return blocks with eight steps of scale and minimum, six bits each; a minimum is subtracted."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], 1)
    minimums = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], 1)
    halves = _halves(blocks[:, :4]) ^ np.array([0, 0x8000], np.uint16)
    return _Taken(codes, halves, np.stack([scales, minimums], 2).view(np.int8))


def _q6_k(blocks: Bytes) -> _Taken:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return _Taken(codes, _halves(blocks[:, 208:]), np.ascontiguousarray(blocks[:, 192:208, None]).view(np.int8))


FORMATS = {
    2: _plain(18, 1, lambda data: _fields(data, 4, 16)),  # Q4_0
    3: _plain(20, 2, lambda data: _fields(data, 4, 16)),  # Q4_1
    6: _plain(22, 1, _five),  # Q5_0
    7: _plain(24, 2, _five),  # Q5_1
    8: _plain(34, 1, lambda data: data ^ np.uint8(128)),  # Q8_0: a number with a sign, plus 128
    12: _Format(144, lambda blocks: _with_minimum(blocks, _fields(blocks[:, 16:], 4, 32))),  # Q4_K
    13: _Format(
        176,
        lambda blocks: _with_minimum(
            blocks, _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
        ),
    ),  # Q5_K
    14: _Format(210, _q6_k),
}
"""GGUF's formats that the library reads, by their numbers there."""

"""Weights in GGUF's formats stand for the numbers that gguf dequantises them to, with the same bits in products."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.native.build import PackedMatrix, UnsuitableError, gated_order, library
from drafter.native.coded import FORMATS, CodedMatrix, Stored

gguf = pytest.importorskip("gguf")

# Where a block has fp16 numbers; the other bytes may be any.
HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}


def stored(kind: int, rows: int = 45, blocks: int = 2, seed: int = 0) -> tuple[Stored, Tensor]:
    """A matrix whose outputs are the rows of a file in another order, and its weights as gguf says."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][1]
    generator = np.random.default_rng(seed)
    content = generator.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for place in HALVES[kind]:
        halves = generator.normal(0, 0.01, (len(content), 1)).astype(np.float16)
        halves[:3, 0] = 0.0, 6e-8, -3e-6  # the last two are subnormal
        content[:, place : place + 2] = halves.view(np.uint8)
    order = torch.from_numpy(generator.permutation(rows))
    weights = gguf.quants.dequantize(content.reshape(rows, -1), gguf.GGMLQuantizationType(kind))
    return Stored(kind, content.reshape(rows, -1), order), torch.from_numpy(weights)[order]


def product_of_floats(weights: Tensor, rows: Tensor) -> Tensor:
    """The product that the library computes of weights in fp32."""
    matrix = PackedMatrix(weights)
    assert not matrix.half
    found, struct = torch.empty(len(rows), len(weights)), matrix.struct()
    library().drafter_multiply(ctypes.byref(struct), rows.data_ptr(), len(rows), found.data_ptr(), 1)
    return found


def test_the_formats_are_those_of_the_library() -> None:
    assert {kind for kind in range(64) if library().drafter_coded_bytes(kind, 256)} == set(FORMATS)
    assert library().drafter_coded_bytes(12, 32) == 0  # a block has 256 inputs


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_and_products_are_those_of_dequantised_weights_to_the_last_bit(kind: int) -> None:
    """Products with any number of rows, by any number of threads, too; outputs that fill no block included."""
    part, weights = stored(kind)
    matrix = CodedMatrix([part])
    assert torch.equal(matrix.expanded(matrix.places[0]), weights)
    some = torch.tensor([[44, 0], [17, 17]])
    assert torch.equal(matrix.expanded(some), weights[torch.argsort(matrix.places[0])][some])
    rows = torch.randn(17, weights.shape[1], generator=torch.Generator().manual_seed(0))
    whole = product_of_floats(weights, rows)
    for count in (1, 2, 3, 4, 7, 17):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(matrix.product(rows[:count]), whole[:count]), (count, threads)


def test_a_literal_block_of_q4_1() -> None:
    """Scale 0.5, offset −1; byte i has the code of input i below that of input i + 16."""
    block = np.array([[0x00, 0x38, 0x00, 0xBC, *(i | (15 - i) << 4 for i in range(16))]], np.uint8)
    matrix = CodedMatrix([Stored(3, block, torch.tensor([0]))])
    codes = [*range(16), *reversed(range(16))]
    assert matrix.expanded(torch.tensor([0])).tolist() == [[0.5 * code - 1 for code in codes]]


def test_layers_lie_behind_one_another_and_a_gate_beside_what_it_gates() -> None:
    (first, one), (second, other) = stored(8, rows=64), stored(2, rows=45)
    matrix = CodedMatrix([first, second])
    assert matrix.outputs == 109
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(matrix.product(rows), product_of_floats(torch.cat([one, other]), rows))
    assert torch.equal(matrix.expanded(matrix.places[1]), other)
    (gate, one), (up, other) = stored(3, rows=20), stored(3, rows=20, seed=1)
    order = gated_order(20)
    both = CodedMatrix([gate, up], torch.arange(40.0), order)
    assert [torch.equal(both.expanded(both.places[part]), weights) for part, weights in enumerate((one, other))]
    assert not both.expanded(torch.arange(len(order)))[order < 0].any()
    assert both.struct().bias is not None
    assert both.struct(bias=False).bias is None


def test_formats_that_would_share_a_block_are_refused() -> None:
    first, second = stored(8, rows=45)[0], stored(2, rows=45)[0]
    for order in (None, gated_order(45)):
        with pytest.raises(UnsuitableError, match="different formats"):
            CodedMatrix([first, second], order=order)

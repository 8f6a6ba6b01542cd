"""The native reader computes the frames of the one in PyTorch."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.drafters.contract import DraftContext, Loan
from drafter.heads.attention import AttentionModule, AttentionReader, NativeAttentionReader
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from tests.support.heads import sequence


def module_of(base: BaseModel, heads: int = 2) -> AttentionModule:
    torch.manual_seed(0)
    module = AttentionModule(base.hidden_size, 5, num_layers=2, num_heads=heads, intermediate_size=40, rope_theta=1e4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.requires_grad_(False)


@settings(max_examples=25)
@given(
    steps=st.lists(st.lists(st.integers(1, 5), min_size=3, max_size=3), min_size=1, max_size=4), count=st.integers(1, 5)
)
@torch.inference_mode()
def test_the_same_frames(tiny_base: BaseModel, steps: list[list[int]], count: int) -> None:
    """After prompts of different lengths, and then after steps of a few tokens each."""
    module = module_of(tiny_base)
    readers = AttentionReader(module, tiny_base, 5), NativeAttentionReader(module, tiny_base, 5)
    tokens, hidden = sequence(tiny_base, 3, 60)
    for reader in readers:
        reader.open(Loan(tiny_base, 3, 60, StageTimes()))
    lengths = [1, 9, 20]
    for step in [[0, 0, 0], *steps]:
        lengths = [length + more for length, more in zip(lengths, step, strict=True)]
        context = DraftContext(tokens, hidden, torch.tensor(lengths), lengths)
        for reader in readers:
            reader.prepare(context)
        ours, theirs = (reader.read(context, count) for reader in readers)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_rows_of_other_slots_and_copies(tiny_base: BaseModel) -> None:
    """A copied beginning is not read again, and gives the same frames."""
    module = module_of(tiny_base)
    tokens, hidden = sequence(tiny_base, 1, 40)
    tokens, hidden = tokens.expand(2, -1).contiguous(), hidden.expand(2, -1, -1).contiguous()
    reader = module.reader(tiny_base, 5)
    assert isinstance(reader, NativeAttentionReader)
    reader.open(Loan(tiny_base, 2, 40, StageTimes()))
    alone = DraftContext(tokens[:1], hidden[:1], torch.tensor([30]), [30])
    reader.prepare(alone)
    expected = reader.read(alone)
    for state in reader.slots:
        state.enter(1, np.empty(0, dtype=np.int64))
        state.copy(0, 1, 28)
    both = DraftContext(tokens, hidden, torch.tensor([30, 30]), [30, 30])
    reader.prepare(both)
    frames = reader.read(both)
    torch.testing.assert_close(frames[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(frames[1], expected[0], rtol=1e-5, atol=1e-6)


def test_heads_of_other_sizes_are_read_by_pytorch(tiny_base: BaseModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reader = module_of(tiny_base, heads=8).reader(tiny_base, 5)
    assert type(reader) is AttentionReader
    assert "no attention for heads of 4 numbers" in caplog.text

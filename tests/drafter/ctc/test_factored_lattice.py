"""The factored LM head gives the shares of the LM head as it is, and reads it once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter import devices
from drafter.ctc.head import CTCHead, FrameLattice, is_factored, label_factor
from drafter.drafters.target import OutputLayer
from drafter.target_model.model import BaseModel
from tests.drafter.ctc.test_native_search import KINDS_WITH_CONTEXT, sharp_head
from tests.support.heads import DEPTH, make_head
from tests.support.properties import examples
from tests.support.trees import check_same_trees


@examples(40)
@given(
    kind=st.sampled_from(KINDS_WITH_CONTEXT),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3),
    paths=st.integers(1, 4),
    first=st.integers(0, 3),
)
@torch.no_grad()
def test_the_same_shares(tiny_base: BaseModel, kind: str, seed: int, rows: int, paths: int, first: int) -> None:
    head = sharp_head(tiny_base, kind, seed)
    head.norm.bias.normal_()
    states = 3 * torch.randn(rows, head.config.num_frames, tiny_base.hidden_size) + 1
    recent = torch.randint(tiny_base.vocab_size, (rows, head.recent_tokens))
    labels = torch.randint(tiny_base.vocab_size, (rows * paths, head.recent_tokens))
    stop = min(first + head.config.band, head.config.num_frames)
    whole = FrameLattice(head, tiny_base, states, recent)
    factored = FrameLattice(head, tiny_base, states, recent, label_factor(head, tiny_base))
    row = torch.arange(rows).repeat_interleave(paths)
    for ours, theirs in zip(
        factored.score(first, stop, row, labels), whole.score(first, stop, row, labels), strict=True
    ):
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["context 1", "context 2", "context 2, in part"])
@torch.no_grad()
def test_a_draft_reads_the_lm_head_once(tiny_base: BaseModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all frames at once; the trees are those of the LM head as it is. What is not smaller is not factored."""
    head = make_head(tiny_base, kind, joint_size=4)
    assert isinstance(head, CTCHead)
    states = torch.randn(3, head.config.num_frames, tiny_base.hidden_size)
    recent = torch.randint(tiny_base.vocab_size, (3, head.recent_tokens))
    expected = head.search(states, recent, tiny_base, 16, "exact")
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    search = head.prepared_search(tiny_base, "exact")
    passes: list[torch.Size] = []
    output = type(head.output(tiny_base))
    lm_head = output.lm_head

    def noted(self: OutputLayer, states: Tensor) -> Tensor:
        passes.append(states.shape)
        return lm_head(self, states)

    monkeypatch.setattr(output, "lm_head", noted)
    check_same_trees(search(states, recent, 16, 0.0), expected, DEPTH)
    assert passes == [states.shape]
    large = make_head(tiny_base, kind, joint_size=16)
    assert isinstance(large, CTCHead)
    assert not is_factored(large, tiny_base)

from __future__ import annotations

import pytest
import torch

from drafter.heads.config import HeadConfig
from drafter.methods.medusa.head import MedusaHead
from drafter.target_model.model import BaseModel
from tests.support.heads import DEPTH, sequence, untrained_head


def test_medusa_starts_as_the_base(tiny_base: BaseModel) -> None:
    """At first every head predicts the base's next token."""
    head = untrained_head(tiny_base, "medusa")
    assert isinstance(head, MedusaHead)
    _, hidden = sequence(tiny_base, 1, 6)
    frames = head.module(torch.zeros_like(hidden), hidden, torch.tensor([[1, 2, 3, 4, 5, 6]]))[0]
    expected = tiny_base.lm_head(hidden[0]).log_softmax(-1)
    for depth in range(DEPTH):
        assert torch.allclose(head.log_probs(frames)[:, depth], expected, atol=1e-4)


def test_medusas_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        HeadConfig(hidden_size=32, vocab_size=97, depth=0)

from __future__ import annotations

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from drafter.heads import chosen_log_probs as chosen
from drafter.heads.chosen_log_probs import chosen_log_probs


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_whole_softmax(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """For every size of portion. A token that is asked for twice counts twice."""
    monkeypatch.setattr(chosen, "_PORTION", {"cpu": rows * tiny_base.vocab_size})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, tiny_base.vocab_size, (2, 5, 3), generator=generator)
    tokens[..., 2] = tokens[..., 0]
    weights = torch.randn(2, 5, 3, generator=generator)
    ours = torch.randn(2, 5, tiny_base.hidden_size, generator=generator).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    found = chosen_log_probs(tiny_base, ours, tokens)
    expected = tiny_base.lm_head(theirs).log_softmax(-1).gather(2, tokens)
    assert torch.allclose(found, expected, atol=1e-5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert tiny_base.lm_head_weight.grad is None


def test_the_logits_of_all_places_are_never_held(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_PORTION", {"cpu": 4 * tiny_base.vocab_size})
    largest = 0

    def lm_head(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return BaseModel.lm_head(tiny_base, hidden)

    monkeypatch.setattr(tiny_base, "lm_head", lm_head)
    states = torch.randn(30, tiny_base.hidden_size, requires_grad=True)
    chosen_log_probs(tiny_base, states, torch.zeros(30, 1, dtype=torch.long)).sum().backward()
    assert largest == 4

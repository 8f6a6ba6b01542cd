from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from drafter.heads import losses as chosen
from drafter.heads.losses import chosen_log_probs
from drafter.target_model.model import BaseModel


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_whole_softmax(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """For every size of portion. A token that is asked for twice counts twice."""
    monkeypatch.setattr(chosen, "_FEWEST_ROWS", rows)
    monkeypatch.setattr(chosen, "_PORTION", {})
    monkeypatch.setattr(chosen, "_LARGE_PORTION", 0)
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
    monkeypatch.setattr(chosen, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(chosen, "_PORTION", {"cpu": 4 * tiny_base.vocab_size})
    largest = 0

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (tiny_base.vocab_size,):
                largest = max(largest, len(made))
            return made

    states = torch.randn(30, tiny_base.hidden_size, requires_grad=True)
    with Watch():
        chosen_log_probs(tiny_base, states, torch.zeros(30, 1, dtype=torch.long)).sum().backward()
    assert largest == 4


def test_the_gradient_of_a_nearly_certain_token_keeps_its_precision_in_bf16(tiny_base: BaseModel) -> None:
    """It is small, and must not be lost in the rounding of a mean over all rows."""
    row = tiny_base.lm_head_weight[5].float()
    states = (8.0 * row / row.square().sum())[None]  # its logit is 8
    gradients = []
    for enabled in (False, True):
        ours = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            chosen = chosen_log_probs(tiny_base, ours, torch.tensor([[5]]))
        chosen.sum().backward()
        assert ours.grad is not None
        gradients.append(ours.grad)
    assert -0.2 < chosen.item() < 0.0
    assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1]).item() > 0.999

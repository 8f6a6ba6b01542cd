"""What the hybrid begins with, and what it learns."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from drafter.embedded import EMBEDDED_BASE
from recipes.hybrid.train import LAYER_TYPES, build_model, divergence


def teacher() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(EMBEDDED_BASE, dtype=torch.float32).eval()


@torch.no_grad()
def test_softmax_attention_begins_as_that_of_the_teacher() -> None:
    """A text of one token reads its own value alone, whatever becomes of queries and keys."""
    base = teacher()
    model, inner = build_model(base, LAYER_TYPES["softmax"]), torch.randn(1, 1, base.config.hidden_size)
    cosine_and_sine = base.model.rotary_emb(inner, torch.tensor([[0]]))
    for ours, theirs in zip(model.model.layers, (base.model.layers[place] for place in (0, 2, 5, 7)), strict=True):
        found, wanted = (one.self_attn(inner, cosine_and_sine, None)[0] for one in (ours, theirs))
        assert torch.allclose(found, wanted, atol=1e-5)


@torch.no_grad()
def test_the_largest_neurons_of_the_teacher_are_kept() -> None:
    """Of neurons at random, two thirds of the output's norm would be missing."""
    base, inner = teacher(), torch.randn(64, 256)
    kept = build_model(base, LAYER_TYPES["softmax"]).model.layers[0].mlp(inner)
    whole = base.model.layers[0].mlp(inner)
    assert float((whole - kept).norm()) < 0.5 * float(whole.norm())


def test_padding_is_not_learnt() -> None:
    base = teacher()
    model = build_model(base, LAYER_TYPES["hybrid"])
    text = torch.tensor([[5, 9, 11, 3], [8, 4, 6, 2]])
    padded = torch.nn.functional.pad(text, (0, 3), value=-100)
    assert divergence(base, base, padded).item() == 0
    found = divergence(model, base, text)
    assert found.item() > 0.01
    assert torch.allclose(found, divergence(model, base, padded), rtol=0.02)
    found.backward()
    mixer = model.model.layers[0].linear_attn
    assert all(bool(one.grad.abs().sum() > 0) for one in (mixer.in_proj_qkv.weight, mixer.dt_bias, mixer.A_log))

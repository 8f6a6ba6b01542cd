"""Linear layers whose weights are laid out once compute what they did before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drafter import prepacked
from drafter.base_model import BaseModel
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.plain import PlainDecoding
from drafter.prepacked import PrepackedLinear, _by_half, as_loaded, halved_weights, prepack
from drafter.requests import Request, SamplingParams
from tests.models import generate_reference, random_model, random_prompts, run_engine


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10, bias=bias), nn.SiLU(), nn.Linear(10, 4, bias=bias))


@pytest.mark.parametrize("shape", [(1, 6), (6,), (3, 6), (2, 5, 6), (0, 6), (1, 300, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_products(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that came from any precision; a single row, too, by the prepacked weights."""
    monkeypatch.setattr(prepacked, "_SMALL", 0)
    module, rows = layers(bias).to(dtype).float(), torch.randn(shape)
    with torch.no_grad():
        before = module(rows)
        prepack(module)
        assert [type(module[place]) for place in (0, 2)] == [PrepackedLinear] * 2
        torch.testing.assert_close(module(rows), before)
        assert halved_weights(module) == (0 if dtype == torch.float32 else 100)


def test_half_the_bytes_where_nothing_is_lost() -> None:
    weight = torch.randn(40, 30)
    assert _by_half(weight, None) is None
    weight = weight.bfloat16().float()
    weight[0, :3] = torch.tensor([0.0, 2.0**-25, -(2.0**-29)])
    weight[1] = weight[1] / 1024
    product = _by_half(weight, None)
    assert product is not None
    rows = torch.eye(30)
    assert torch.equal(product(rows), weight.T)  # every weight, bit by bit
    weight[0, 0] = 2.0**-60
    assert _by_half(weight, None) is None
    weight[0, 0] = torch.nan
    assert _by_half(weight, None) is None
    assert _by_half(torch.zeros(2, 3), None) is not None


def test_rows_that_are_not_contiguous() -> None:
    module, rows = layers(), torch.randn(6, 5, 8).transpose(0, 2)[::2]
    with torch.inference_mode():
        before = module(rows)
        prepack(module)
        torch.testing.assert_close(module(rows), before)


def test_gradients_and_names_stay() -> None:
    module, rows = layers(), torch.randn(3, 6, requires_grad=True)
    names = list(module.state_dict())

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(module(rows).sum(), [rows, *module.parameters()]))

    before = gradients()
    prepack(module)
    torch.testing.assert_close(gradients(), before)
    assert list(module.state_dict()) == names


def test_weights_that_change() -> None:
    module, rows = layers(), torch.randn(3, 6)
    prepack(module)
    with torch.no_grad():
        before = module(rows)
        next(module.parameters()).mul_(2)
        changed = module(rows)
        assert not torch.allclose(changed, before)
        same = module[2].product
        prepack(module)
        torch.testing.assert_close(module(rows), changed)
        assert module[2].product is same  # its weights have not changed: nothing to do


def test_autocast() -> None:
    module, rows = layers(), torch.randn(3, 6)
    prepack(module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert module(rows).dtype == torch.bfloat16


def test_what_is_not_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantised(nn.Linear):
        pass

    others = nn.Sequential(Quantised(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta"))
    kinds = [type(layer) for layer in others]
    prepack(others)
    assert [type(layer) for layer in others] == kinds
    module = layers()
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 1000)  # 400 bytes of weights
    prepack(module)
    assert type(module[0]) is nn.Linear
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 1400)
    prepack(module)
    assert type(module[0]) is PrepackedLinear


def test_a_base_and_the_model_as_it_was_loaded() -> None:
    base = BaseModel(random_model("llama"))
    head = base.model.get_output_embeddings()
    assert type(head) is PrepackedLinear
    with as_loaded(base.model):
        assert type(head) is nn.Linear
    assert type(head) is PrepackedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_those_of_the_model_as_it_was_loaded(dtype: torch.dtype) -> None:
    """Plain and drafting, alone and together, from checkpoints of both precisions."""
    base, prompts = BaseModel(random_model("llama").to(dtype).float()), random_prompts(6)
    assert bool(halved_weights(base.model)) == (dtype == torch.bfloat16)
    with as_loaded(base.model):
        expected = [generate_reference(base.model, prompt, 20) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(20)) for prompt in prompts]
    for drafter, slots in ((PlainDecoding(), 1), (NgramDrafter(9), 1), (NgramDrafter(9), 4)):
        made = run_engine(base, drafter, requests, slots=slots, max_length=64)
        assert [one.token_ids for one in made] == expected

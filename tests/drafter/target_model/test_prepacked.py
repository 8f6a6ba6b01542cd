"""Prepacked linear layers compute what they computed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from drafter.drafters.contract import PlainDecoding
from drafter.requests import Request, SamplingParams
from drafter.target_model import prepacked
from drafter.target_model.model import BaseModel
from drafter.target_model.prepacked import (
    PrepackedLinear,
    Product,
    Way,
    _as_it_is,
    _by_columns,
    _by_half,
    _by_onednn,
    _fits_half,
    as_loaded,
    halved_weights,
    prepack,
)
from tests.support.models import OracleDrafter, generate_reference, random_model, random_prompts, run_engine, tokens_of


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10, bias=bias), nn.SiLU(), nn.Linear(10, 4, bias=bias))


WAYS: dict[str, Way] = {way.__name__: way for way in (_as_it_is, _by_columns, _by_onednn, _by_half)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
every_way = pytest.mark.parametrize(
    ("way", "origin"), [(way, origin) for way in WAYS for origin in DTYPES if (way, origin) != ("_by_half", "fp32")]
)
"""By every way, of weights that came from any precision."""


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make one of the ways the fastest, for few rows and for many."""
    return lambda way: monkeypatch.setattr(prepacked, "_fastest_ways", lambda kind, layers: (WAYS[way], WAYS[way]))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "_fastest", {})


@pytest.mark.parametrize("shape", [(1, 6), (6,), (3, 6), (2, 5, 6), (0, 6), (1, 300, 6)])
@pytest.mark.parametrize("bias", [True, False])
@every_way
def test_the_same_products(
    shape: tuple[int, ...], bias: bool, way: str, origin: str, take: Callable[[str], None]
) -> None:
    take(way)
    module, rows = layers(bias).to(DTYPES[origin]).float(), torch.randn(shape)
    with torch.no_grad():
        before = module(rows)
        prepack(module)
        assert [type(module[place]) for place in (0, 2)] == [PrepackedLinear] * 2
        torch.testing.assert_close(module(rows), before)
        assert halved_weights(module) == (100 if way == "_by_half" else 0)
        assert all(_fits_half(one) == (origin != "fp32") for one in module.parameters() if one.dim() == 2)


def test_few_rows_one_way_and_many_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prepacked, "_fastest_ways", lambda kind, layers: (_as_it_is, lambda *_: Product(torch.zeros_like))
    )
    module = nn.Linear(6, 6)
    prepack(module)
    with torch.no_grad():
        assert module(torch.ones(2, 16, 6)).any()
        assert not module(torch.ones(3, 11, 6)).any()


def test_the_fastest_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few rows and for many, by the sum of times. A way that is only a little faster is not taken."""
    took = {"_as_it_is": (1.04, 1.04), "_by_columns": (1.0, 1.0), "_by_onednn": (9.0, 0.5), "_by_half": (0.9, 9.0)}
    timed: list[int] = []

    def seconds(products: Sequence[Product], rows: Tensor) -> float:
        timed.append(len(products))
        halved, own = products[0].halved, products[0].own
        name = (
            "_by_half"
            if halved
            else "_by_onednn"
            if own is None
            else "_by_columns"
            if own.stride(0) == 1
            else "_as_it_is"
        )
        return took[name][len(rows) > 32]

    monkeypatch.setattr(prepacked, "_seconds", seconds)
    monkeypatch.setattr(prepacked, "_SMALL", 60)
    prepack(nn.Sequential(*(nn.Linear(6, 10) for _ in range(3))))
    assert set(timed) == {3}
    kind = next(iter(prepacked._fastest))
    assert (kind.inputs, kind.outputs, kind.fits_half) == (6, 10, False)
    assert prepacked._fastest[kind] == (_as_it_is, _by_onednn)
    half = nn.Linear(6, 10).bfloat16().float()
    prepack(half)
    assert halved_weights(half) == 60
    timed.clear()
    prepack(nn.Linear(6, 10))
    prepack(nn.Linear(6, 9))
    assert not timed  # once for each kind; the other is too small


def test_half_the_bytes_where_nothing_is_lost() -> None:
    weight = torch.randn(40, 30)
    assert not _fits_half(weight)
    weight = weight.bfloat16().float()
    weight[0, :3] = torch.tensor([0.0, 2.0**-25, -(2.0**-29)])
    weight[1] = weight[1] / 1024
    assert _fits_half(weight)
    assert torch.equal(_by_half(weight, None).of(torch.eye(30)), weight.T)  # every weight, bit by bit
    weight[0, 0] = 2.0**-60
    assert not _fits_half(weight)
    weight[0, 0] = torch.nan
    assert not _fits_half(weight)
    assert _fits_half(torch.zeros(2, 3))


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
        same = module[2].few
        prepack(module)
        torch.testing.assert_close(module(rows), changed)
        assert module[2].few is same  # its weights have not changed: nothing to do


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
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 1600)
    prepack(module)
    assert type(module[0]) is PrepackedLinear


def test_a_base_and_the_model_as_it_was_loaded() -> None:
    base = BaseModel(random_model("llama"), native=False)
    head = base.model.get_output_embeddings()
    assert type(head) is PrepackedLinear
    with as_loaded(base.model):
        assert type(head) is nn.Linear
    assert type(head) is PrepackedLinear


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "origin"),
    [
        ("_as_it_is", "fp32"),
        ("_by_columns", "fp16"),
        ("_by_onednn", "bf16"),
        ("_by_half", "bf16"),
        ("_by_half", "fp16"),
    ],
)
def test_the_tokens_are_those_of_the_model_as_it_was_loaded(way: str, origin: str, take: Callable[[str], None]) -> None:
    """With and without drafting, alone and in a batch."""
    take(way)
    base, prompts = BaseModel(random_model("llama").to(DTYPES[origin]).float()), random_prompts(6)
    assert bool(halved_weights(base.model)) == (way == "_by_half")
    with as_loaded(base.model):
        expected = [generate_reference(base.model, prompt, 20) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(20)) for prompt in prompts]
    oracle = OracleDrafter([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    for drafter, slots in ((PlainDecoding(), 1), (oracle, 1), (oracle, 4)):
        made = run_engine(base, drafter, requests, max_num_seqs=slots, max_model_len=64)
        assert tokens_of(made) == expected

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from drafter.sampling import (
    SamplingMode,
    SamplingTable,
    choose,
    filter_logits,
    inverse_cdf,
    keyed_uniforms,
    penalise,
    seen_tokens,
)

CPU = torch.device("cpu")


def table_of(params: list[SamplingParams], prompt: int = 1, length: int = 8) -> SamplingTable:
    table = SamplingTable.empty(len(params), length, CPU)
    for slot, one in enumerate(params):
        table.set(slot, one, prompt, length)
    return table


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    assert torch.equal(keyed_uniforms(3, 100)[:10], keyed_uniforms(3, 10))
    assert not torch.equal(keyed_uniforms(3, 10), keyed_uniforms(4, 10))
    # Written down once, so that a change of the generator cannot pass unseen.
    assert keyed_uniforms(0, 3).tolist() == pytest.approx([0.01154675420, 0.24154919656, 0.11142585551], abs=1e-10)


def test_uniforms_are_uniform() -> None:
    counts = np.bincount((keyed_uniforms(11, 50_000).numpy() * 20).astype(int), minlength=20)
    assert chisquare(counts).pvalue > 1e-4


def test_inverse_cdf_goes_by_token_id() -> None:
    scores = torch.tensor([[0.5, 0.2, 0.3]]).log().double().expand(4, -1)
    assert inverse_cdf(scores, torch.tensor([0.0, 0.49, 0.51, 0.999])).tolist() == [0, 0, 1, 2]


def test_inverse_cdf_never_takes_a_dropped_token() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).double().expand(3, -1)
    assert inverse_cdf(scores, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 31, generator=generator).double() * 3
    context = torch.randint(0, 31, (1, 6), generator=generator)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    expected = processors(context, logits)

    seen = torch.zeros(1, 31, dtype=torch.bool).scatter_(1, context, True)
    scores = penalise(logits, seen, torch.tensor([[penalty]])) / temperature
    ours = filter_logits(
        scores, torch.tensor([top_k]), torch.tensor([top_p]).double(), torch.tensor([min_p]).double(), ranked=True
    )
    assert torch.equal(ours.isfinite(), expected.isfinite())
    assert torch.allclose(ours.softmax(-1), expected.softmax(-1))


def test_seen_tokens_follow_the_path_to_the_node() -> None:
    # Row text 1 2 (and a stale 5), tree root 2 with children 3 and 4.
    seen = seen_tokens(
        torch.tensor([[1, 2, 5]]),
        torch.tensor([1]),
        torch.tensor([[2, 3, 4]]),
        torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool(),
        6,
    )
    assert [row.nonzero()[:, 0].tolist() for row in seen[0]] == [[1, 2], [1, 2, 3], [1, 2, 4]]


def test_greedy_rows_and_random_rows_share_a_batch() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=5)]
    logits = torch.zeros(2, 1, 10)
    logits[:, :, 7] = 0.1
    choices = choose(logits, table_of(params), SamplingMode.of(params), torch.tensor([[1], [1]]), None)
    expected = int(keyed_uniforms(5, 1)[0] * 10)
    assert choices[0].item() == 7
    assert abs(choices[1].item() - expected) <= 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1, top_k=9, top_p=0.95),
    ],
)
def test_choices_have_the_exact_distribution(params: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    draws = 20_000
    table = table_of([params], length=draws)
    mode = SamplingMode.of([params])
    positions = torch.arange(1, draws + 1)[None]
    chosen = choose(logits.expand(1, draws, -1), table, mode, positions, None)[0]

    exact = (logits.double() / params.temperature).softmax(-1).numpy()
    order = np.argsort(-exact)
    keep = np.ones(12, dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    ranked = np.where(keep, exact, 0)[order] / exact[keep].sum()
    keep[order[np.cumsum(ranked) - ranked >= params.top_p]] = False
    keep &= exact >= params.min_p * exact.max()
    exact = np.where(keep, exact, 0) / exact[keep].sum()
    counts = np.bincount(chosen.numpy(), minlength=12)
    assert counts[~keep].sum() == 0
    assert chisquare(counts[keep], draws * exact[keep]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", float("inf")),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("stop", "end"),
        ("stop", ("",)),
        ("ignore_eos", "yes"),
    ],
)
def test_bad_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_extreme_settings_still_choose_a_token() -> None:
    logits = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(2))
    best = int(logits.argmax())
    for setting in ({"temperature": 1e-320}, {"temperature": 1e308, "min_p": 1.0}, {"temperature": 1.0, "top_k": 1}):
        params = SamplingParams(seed=7, **setting)  # type: ignore[arg-type]
        table, mode = table_of([params]), SamplingMode.of([params])
        chosen = choose(logits, table, mode, torch.tensor([[1]]), None)
        assert chosen.item() == best or setting["temperature"] == 1e308
    everything = SamplingParams(temperature=1.0, top_k=10**30)
    assert choose(logits, table_of([everything]), SamplingMode.of([everything]), torch.tensor([[1]]), None).item() < 12

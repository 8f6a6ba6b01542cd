""""""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafter import devices
from drafter.acceptance import sampling
from drafter.acceptance.sampling import keep_probable, keep_ranked, penalise


@pytest.mark.parametrize("asynchronous", [False, True])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_filters_keep_what_transformers_keeps(
    asynchronous: bool,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: asynchronous)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 31, generator=generator).double() * 3
    context = torch.randint(0, 31, (1, 6), generator=generator)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    expected = processors(context, logits)

    none = torch.zeros(1)
    seen = torch.zeros(1, 31).scatter_add(1, context, torch.ones(1, 6))
    penalised = penalise(logits, seen, seen, torch.tensor([penalty]), none, none)
    scores = penalised / temperature
    scores = scores - scores.amax(1, keepdim=True)
    ours = keep_ranked(scores, torch.tensor([top_k]), torch.tensor([top_p]).double())
    ours = keep_probable(ours, torch.tensor([min_p]).double())
    assert torch.equal(ours.isfinite(), expected.isfinite())
    assert torch.allclose(ours.softmax(-1), expected.softmax(-1))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ties_at_a_threshold_are_kept(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: asynchronous)
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]]).double()

    def kept(top_k: int, top_p: float) -> list[bool]:
        one = keep_ranked(scores, torch.tensor([top_k]), torch.tensor([top_p]).double())
        return one[0].isfinite().tolist()

    assert kept(2, 1.0) == [True, True, True, True, False]
    assert kept(0, 0.5) == [True, True, True, True, False]
    assert kept(1, 0.1) == [True, False, False, False, False]
    assert kept(0, 1.0) == kept(5, 1.0) == kept(9, 1.0) == [True] * 5


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([1e-9, 0.01, 1.0, 30.0]),
    steps=st.sampled_from([1, 4, 1000, 1 << 40]),
    few=st.sampled_from([2, 7, 64]),
    filters_of=st.sampled_from(["top-k", "top-p", "both"]),
)
def test_both_routes_keep_the_same_however_few_scores_are_sorted_first(
    seed: int, spread: float, steps: int, few: int, filters_of: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(5, 64, generator=generator).double() * steps).round() / steps * spread
    scores -= scores.amax(1, keepdim=True)
    scores[0, 3:9] = -torch.inf
    top_k = torch.randint(0, 70, (5,), generator=generator) if filters_of != "top-p" else None
    top_p = torch.rand(5, generator=generator).double().clamp_min(0.01) if filters_of != "top-k" else None
    if top_p is not None:
        top_p[1], top_p[2] = 1, 1 - 2**-53
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_FEW", few)
        looked = keep_ranked(scores, top_k, top_p)
        patch.setattr(devices, "is_asynchronous", lambda device: True)
        searched = keep_ranked(scores, top_k, top_p)
    assert torch.equal(looked, searched)
    masses = sampling._masses(scores)
    for row in range(5):
        assert looked[row].isfinite().tolist() == kept_by_definition(
            scores[row].tolist(),
            masses[row].tolist(),
            0 if top_k is None else int(top_k[row]),
            1.0 if top_p is None else float(top_p[row]),
        )


def kept_by_definition(scores: list[float], masses: list[int], top_k: int, top_p: float) -> list[bool]:
    """Which tokens are kept, one by one, with exact sums of the masses that `filters` gives them."""
    kth = sorted(scores, reverse=True)[min(top_k or len(scores), len(scores)) - 1]
    masses = [mass if score >= kth else 0 for mass, score in zip(masses, scores, strict=True)]
    wanted = min(Fraction(top_p * float(sum(masses))), Fraction(sum(masses)))
    above = [sum(mass for mass, other in zip(masses, scores, strict=True) if other > score) for score in scores]
    return [
        math.isfinite(score) and score >= kth and (top_p == 1 or mass < wanted)
        for score, mass in zip(scores, above, strict=True)
    ]


def test_a_row_that_is_not_a_number_does_no_harm_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    scores = torch.tensor([[0.0, -1.0, -3.0], [torch.nan] * 3, [-torch.inf, torch.nan, 0.0]]).double()
    kept = keep_ranked(scores, torch.tensor([2, 2, 0]), torch.tensor([1, 0.5, 0.9]).double())
    assert kept[0].tolist() == [0.0, -1.0, -torch.inf]

"""Filters, keyed noise, and the search for thresholds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor
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
from drafter.acceptance.sampling import (
    draw,
    gumbel,
    hash_,
    keep_probable,
    keep_ranked,
    least_reaching,
    noise_bits,
    penalise,
    seed_key,
)
from tests.support.properties import examples

GOLDEN = 0x9E3779B97F4A7C15


def signed(integer: int) -> int:
    return (integer + (1 << 63)) % (1 << 64) - (1 << 63)


def keys_of(*seeds: int) -> Tensor:
    return torch.tensor([seed_key(seed) for seed in seeds])


def scores_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    scores = logits.double() / temperature
    return scores - scores.amax(-1, keepdim=True)


def draw_densely(scores: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """As on a device that the host does not wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_asynchronous", lambda device: True)
        return draw(scores, keys, positions)


def test_the_hash_is_that_of_splitmix64() -> None:
    """The generator's first numbers from the seed 1234567, as other implementations have them."""
    states = torch.tensor([signed(1234567 + step * GOLDEN) for step in range(1, 6)])
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert hash_(states).tolist() == [signed(one) for one in published]


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    # Written down once, so that a change of the noise cannot pass unseen: it makes other tokens of all seeds.
    noise = noise_bits(keys_of(0, 0, 7), torch.tensor([0, 1, 5]), 5)
    assert noise.tolist() == [
        [-210040008, 483928438, -1911098620, -125811766, 1709556123],
        [330986364, -1345845470, -225694585, 1804430832, -1567520866],
        [-402587092, -1851145836, 1912144663, 401594866, 1491868220],
    ]
    # Neither the other rows nor the size of the vocabulary matter.
    assert torch.equal(noise_bits(keys_of(7), torch.tensor([5]), 12)[:, :5], noise[2:])


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [0, 1, 255, 256, 1 << 63, 1 << 64, (1 << 64) + 1, 10**5000]
    assert len({seed_key(seed) for seed in seeds}) == len(seeds)
    assert all(-(1 << 63) <= seed_key(seed) < 1 << 63 for seed in seeds)


def test_gumbel_noise_is_that_of_the_middle_of_a_step() -> None:
    found = gumbel(torch.tensor([-(1 << 31), 0, (1 << 31) - 1])).tolist()
    # log 2^-33; log(1/2) almost; and -log(1 - 2^-33) is 2^-33 almost.
    assert found == pytest.approx([-math.log(33 * math.log(2)), -math.log(math.log(2)), 33 * math.log(2)], abs=1e-8)


@pytest.mark.parametrize(
    ("seeds", "positions", "tokens"),
    [(1, 1, 200_000), (200, 10, 100), (1, 200_000, 1), (200_000, 1, 1), (2, 500, 200)],
)
def test_noise_is_uniform_and_neighbours_know_nothing_of_each_other(seeds: int, positions: int, tokens: int) -> None:
    from scipy.stats import chi2_contingency, chisquare

    keys = keys_of(*range(seeds)).repeat_interleave(positions)
    places = torch.arange(positions).repeat(seeds)
    noise = (noise_bits(keys, places, tokens) + (1 << 31)).numpy()
    noise = noise.reshape(seeds, positions, tokens)
    for shift in (28, 14, 0):  # the highest, middle and lowest bits
        digits = noise >> shift & 15
        assert chisquare(np.bincount(digits.ravel(), minlength=16)).pvalue > 1e-5
        for axis in range(3):
            for step in (1, 2):
                if digits.shape[axis] > step:
                    ahead = np.take(digits, range(step, digits.shape[axis]), axis)
                    behind = np.take(digits, range(digits.shape[axis] - step), axis)
                    pairs = np.bincount((ahead * 16 + behind).ravel(), minlength=256).reshape(16, 16)
                    assert chi2_contingency(pairs).pvalue > 1e-5


@examples(60)
@given(
    seed=st.integers(0, 1 << 70),
    rows=st.integers(1, 6),
    vocabulary=st.integers(1, 700),
    temperature=st.sampled_from([1e-320, 0.2, 1.0, 30.0, 1e308]),
    kept=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_leaving_out_tokens_that_cannot_win_changes_nothing(
    seed: int, rows: int, vocabulary: int, temperature: float, kept: float
) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn(rows, vocabulary, generator=generator).double() * 4
    dropped = torch.rand(rows, vocabulary, generator=generator) > kept
    dropped.scatter_(1, logits.argmax(-1, keepdim=True), False)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    scores = scores.masked_fill(dropped, -torch.inf)
    keys, positions = keys_of(*range(seed, seed + rows)), torch.arange(rows) * 1000
    expected = (scores + gumbel(noise_bits(keys, positions, vocabulary))).argmax(-1)
    assert torch.equal(draw(scores, keys, positions), expected)
    assert torch.equal(draw_densely(scores, keys, positions), expected)


def test_a_row_of_many_draws_as_it_does_alone() -> None:
    scores = scores_of(torch.randn(9, 60_001, generator=torch.Generator().manual_seed(8)) * 3)
    keys, positions = keys_of(*range(9)), torch.arange(9)
    together = draw(scores, keys, positions)
    assert torch.equal(together, draw_densely(scores, keys, positions))
    alone = [draw(scores[row : row + 1], keys[row : row + 1], positions[row : row + 1]) for row in range(9)]
    assert torch.equal(together, torch.cat(alone))


def test_draws_have_the_exact_distribution() -> None:
    """Also of tokens that are so improbable that they have to be lucky to be looked at."""
    from scipy.stats import chisquare

    probabilities = torch.tensor([0.55, 0.3, 0.1, 0.04, 0.0085, 0.001, 0.0004, 0.0001], dtype=torch.float64)
    count = 300_000
    scores = scores_of(probabilities.log()[None]).expand(count, -1).contiguous()
    drawn = draw(scores, keys_of(3).expand(count), torch.arange(count))
    assert chisquare(np.bincount(drawn.numpy(), minlength=8), count * probabilities.numpy()).pvalue > 1e-4


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    from scipy.stats import chi2_contingency

    seeds, positions = 300, 300
    scores = scores_of(torch.tensor([[0.5, 0.3, 0.2]]).log()).expand(seeds * positions, -1).contiguous()
    keys = keys_of(*range(seeds)).repeat_interleave(positions)
    drawn = draw(scores, keys, torch.arange(positions).repeat(seeds)).view(seeds, positions)
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        pairs = np.bincount((3 * one + other).flatten().numpy(), minlength=9).reshape(3, 3)
        assert chi2_contingency(pairs).pvalue > 1e-4


def test_a_token_that_is_not_drawn_makes_no_difference() -> None:
    """An inverse cumulative distribution would move every edge behind the token's."""
    rows, vocabulary = 400, 50
    generator = torch.Generator().manual_seed(1)
    scores = scores_of(torch.randn(rows, vocabulary, generator=generator))
    keys, positions = keys_of(11).expand(rows), torch.arange(rows)
    before = draw(scores, keys, positions)
    others = torch.randint(vocabulary, (rows,), generator=generator)
    without = scores.scatter(1, others[:, None], -torch.inf)
    after = draw(scores_of(without), keys, positions)
    assert torch.equal(after[before != others], before[before != others])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rounding_moves_few_draws(temperature: float) -> None:
    """Draws from two distributions differ with at most 2d / (1 + d), where d is their total variation distance.

    This is the least that draws can differ with which do not know the other distribution (Bavarian et al. 2020,
    *Optimality of correlated sampling strategies*). An inverse cumulative distribution over many tokens is far above.
    """
    rows, vocabulary = 4000, 2000
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    exact, rounded = scores_of(logits, temperature), scores_of(logits.bfloat16(), temperature)
    keys, positions = keys_of(2).expand(rows), torch.arange(rows)
    differ = (draw(exact, keys, positions) != draw(rounded, keys, positions)).double().mean()
    first, second = exact.softmax(-1), rounded.softmax(-1)
    distance = (first - second).abs().sum(-1) / 2
    bound = (2 * distance / (1 + distance)).mean()
    assert 0 < differ < bound + 3 * (bound / rows).sqrt()
    uniform = torch.rand(rows, 1, generator=generator).double()
    inverse = torch.searchsorted(first.cumsum(-1), uniform) != torch.searchsorted(second.cumsum(-1), uniform)
    assert differ < inverse.double().mean() / 2


@pytest.mark.parametrize("densely", [False, True])
def test_a_row_that_is_not_finite_gets_some_token_and_changes_no_other(densely: bool) -> None:
    way = draw_densely if densely else draw
    logits = torch.randn(5, 31, generator=torch.Generator().manual_seed(3))
    keys, positions = keys_of(*range(5)), torch.arange(5)
    expected = way(scores_of(logits), keys, positions)
    for value in (torch.nan, torch.inf):
        broken = logits.clone()
        broken[1, 4], broken[4] = value, torch.nan
        drawn = way(scores_of(broken), keys, positions)
        assert ((drawn >= 0) & (drawn < 31)).all()
        assert torch.equal(drawn[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.slow
def test_noise_is_the_same_when_compiled() -> None:
    keys, positions = keys_of(*range(40)), torch.arange(40) * 77
    expected = noise_bits(keys, positions, 333)
    assert torch.equal(torch.compile(noise_bits)(keys, positions, 333), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_and_draws_are_the_same_on_a_gpu() -> None:
    keys, positions = keys_of(*range(64)), torch.arange(64) * 1001
    scores = scores_of(torch.randn(64, 5001, generator=torch.Generator().manual_seed(9)) * 3)
    expected = noise_bits(keys, positions, 5001)
    assert torch.equal(noise_bits(keys.cuda(), positions.cuda(), 5001).cpu(), expected)
    assert torch.equal(torch.compile(noise_bits)(keys.cuda(), positions.cuda(), 5001).cpu(), expected)
    drawn = draw(scores, keys, positions)
    assert torch.equal(draw(scores.cuda(), keys.cuda(), positions.cuda()).cpu(), drawn)
    graph, inputs = torch.cuda.CUDAGraph(), (scores.cuda(), keys.cuda(), positions.cuda())
    draw(*inputs)
    with torch.cuda.graph(graph):
        recorded = draw(*inputs)
    graph.replay()
    assert torch.equal(recorded.cpu(), drawn)


@pytest.mark.parametrize("asynchronous", [False, True])
@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@examples(80)
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


LARGEST = 2**63 - 1


def test_thresholds_by_hand() -> None:
    numbers = torch.tensor([[7, 4, 7]]).expand(5, -1)
    wanted = torch.tensor([[1], [2], [3], [4], [LARGEST]])
    assert least_reaching(numbers, torch.ones_like(numbers), wanted).tolist() == [[4], [7], [7], [LARGEST], [LARGEST]]
    weights = torch.tensor([[0, 5, 1]]).expand(5, -1)
    assert least_reaching(numbers, weights, wanted).tolist() == [[4], [4], [4], [4], [LARGEST]]
    for large in (2**62, LARGEST - 2**50, LARGEST - 1, LARGEST):
        numbers, weights = torch.tensor([[0, large, 9]]), torch.tensor([[0, 1, 0]])
        assert least_reaching(numbers, weights, torch.tensor([[1]])).tolist() == [[large]]


@examples(100)
@given(st.data())
def test_a_threshold_reaches_and_none_below_it_does(data: st.DataObject) -> None:
    values = st.integers(0, LARGEST) | st.integers(0, 40) | st.sampled_from([2**50 - 1, 2**50, 2**62, 0x7FF0 << 48])
    numbers = data.draw(st.lists(values, min_size=1, max_size=30))
    weights = data.draw(st.lists(st.integers(0, 2**56), min_size=len(numbers), max_size=len(numbers)))
    wanted = data.draw(st.integers(1, max(sum(weights), 1)))
    found = int(least_reaching(torch.tensor([numbers]), torch.tensor([weights]), torch.tensor([[wanted]])))

    def reached(threshold: int) -> int:
        return sum(weight for number, weight in zip(numbers, weights, strict=True) if number <= threshold)

    if sum(weights) < wanted:
        assert found == LARGEST
    else:
        assert found in numbers
        assert reached(found) >= wanted > reached(found - 1)

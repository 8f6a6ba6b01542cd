from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.search import lattice_on_host
from drafter.search.ctc_prefix import best_trie
from drafter.search.lattice import best_lattice_trie
from tests.support.enumeration import lattice_text_probabilities, prefix_probabilities, text_probabilities
from tests.support.trees import Prefix, check_best, check_slice_contract, nodes


def random_frames(seed: int, batch: int, frames: int, vocabulary: int, sharpness: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, frames, vocabulary + 1, generator=generator) * sharpness
    return logits.log_softmax(-1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    frames=st.integers(1, 5),
    vocabulary=st.integers(1, 4),
    depth=st.integers(1, 5),
    size=st.integers(1, 40),
    sharpness=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
)
def test_finds_the_most_probable_prefixes(
    seed: int, frames: int, vocabulary: int, depth: int, size: int, sharpness: float
) -> None:
    log_probs = random_frames(seed, 2, frames, vocabulary, sharpness)
    tree = best_trie(log_probs, torch.tensor([7, 8]), depth, size)
    assert tree.tokens.shape == (2, size)
    assert tree.tokens[:, 0].tolist() == [7, 8]
    check_slice_contract(tree)
    for row in range(2):
        exact = prefix_probabilities(text_probabilities(log_probs[row]), depth)
        check_best(nodes(tree, row, depth), exact, size)


def test_no_other_trie_of_that_size_is_worth_more() -> None:
    """Every connected set of four prefixes, against the four nodes found."""
    log_probs = random_frames(5, 1, 3, 2, 1.0)
    exact = prefix_probabilities(text_probabilities(log_probs[0]), 3)
    worths = [
        sum(exact[prefix] for prefix in chosen)
        for chosen in itertools.combinations(exact, 4)
        if all(len(prefix) == 1 or prefix[:-1] in chosen for prefix in chosen)
    ]
    found = nodes(best_trie(log_probs, torch.tensor([0]), 3, 5), 0, 3)
    assert len(worths) >= 10
    assert sum(found.values()) == pytest.approx(max(worths), rel=2e-4)


def test_literal_tree() -> None:
    """Two frames over {0, 1, ε}, by hand.

    Texts: 0 by 00, 0ε, ε0 (.06 + .18 + .01); 1 by 11, 1ε, ε1 (.03 + .09 + .03); 01 = .18... and so on.
    """
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]]])
    tree = best_trie(probs.log(), torch.tensor([9]), 2, 5)
    # π(0) = .6 + .1·.1 = .61, π(1) = .3 + .1·.3 = .33, π(01) = .6·.3 = .18, π(10) = .3·.1 = .03.
    assert tree.tokens.tolist() == [[9, 0, 1, 1, 0]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.log_probs.exp()[0].tolist() == pytest.approx([1.0, 0.61, 0.33, 0.18, 0.03], rel=2e-4)


def test_a_real_repeat_is_reached_through_a_blank() -> None:
    probs = torch.tensor([[[0.98, 0.01, 0.01], [0.01, 0.01, 0.98], [0.98, 0.01, 0.01]]])
    tree = best_trie(probs.log(), torch.tensor([5]), 2, 3)
    assert tree.tokens.tolist() == [[5, 0, 0]]
    assert tree.parents.tolist() == [[0, 0, 1]]
    # Without the blank between them, the two frames that say 0 are one 0.
    merged = best_trie(probs[:, [0, 2, 1]].log(), torch.tensor([5]), 2, 3)
    assert nodes(merged, 0, 2).get((0, 0), 0.0) < 0.02


@pytest.mark.parametrize("certain", [0.0, -1e-9, -1e-4])
def test_prices_fall_along_a_path_of_sure_tokens(certain: float) -> None:
    """All tokens of the path have probability 1 up to rounding; nothing else survives float32."""
    log_probs = torch.full((1, 8, 33), -120.0)
    for frame in range(8):
        log_probs[0, frame, frame % 3] = certain
    tree = best_trie(log_probs, torch.tensor([1]), 6, 12)
    check_slice_contract(tree)
    assert tree.tokens[0, :7].tolist() == [1, 0, 1, 2, 0, 1, 2]
    assert tree.depths[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), sharpness=st.sampled_from([0.0, 1.0, 8.0, 60.0, 300.0]))
def test_slice_contract_at_any_sharpness(seed: int, sharpness: float) -> None:
    log_probs = random_frames(seed, 3, 16, 50, sharpness)
    tree = best_trie(log_probs, torch.zeros(3, dtype=torch.long), 8, 64, candidates=16)
    check_slice_contract(tree)
    assert not bool(tree.log_probs.isnan().any())


def test_impossible_frames_leave_padding() -> None:
    log_probs = torch.full((1, 4, 6), -torch.inf)
    log_probs[..., -1] = 0.0
    tree = best_trie(log_probs, torch.tensor([3]), 3, 4)
    assert tree.tokens.tolist() == [[3, -1, -1, -1]]
    assert tree.log_probs.tolist() == [[0.0, -math.inf, -math.inf, -math.inf]]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), sharpness=st.sampled_from([1.0, 3.0]), candidates=st.integers(1, 40))
def test_candidates_miss_only_what_the_bound_allows(seed: int, sharpness: float, candidates: int) -> None:
    log_probs = random_frames(seed, 1, 6, 40, sharpness)
    pending = torch.tensor([0])
    full = nodes(best_trie(log_probs, pending, 4, 16), 0, 4)
    some = nodes(best_trie(log_probs, pending, 4, 16, candidates=candidates), 0, 4)
    sums = log_probs.exp()[0, :, :-1].sum(0).sort(descending=True).values.tolist()
    bound = sums[candidates] if candidates < 40 else 0.0
    for prefix, price in full.items():
        if price > bound * 1.0001:
            assert some[prefix] == pytest.approx(price, rel=1e-4)


def test_a_row_does_not_see_its_batch() -> None:
    log_probs = random_frames(3, 4, 8, 100, 2.0)
    pending = torch.arange(4)
    together = best_trie(log_probs, pending, 6, 20, candidates=32)
    for row in range(4):
        alone = best_trie(log_probs[row : row + 1], pending[row : row + 1], 6, 20, candidates=32)
        assert nodes(together, row, 6).keys() == nodes(alone, 0, 6).keys()


def test_a_tree_of_one_node_is_its_root() -> None:
    assert best_trie(random_frames(0, 2, 4, 5, 1.0), torch.tensor([1, 2]), 3, 1).tokens.tolist() == [[1], [2]]


@dataclass(frozen=True)
class LastLabels:
    """Frames that depend on the last labels, by a `table` `[T, 10, ..., V + 1]`; `before` `[B, c]` are the roots'."""

    table: Tensor
    before: Tensor

    def start(self) -> Tensor:
        return self.before

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.stack([self.table[j][state.unbind(-1)] for j in range(first, stop)], 1)
        return log_probs[..., :-1], log_probs[..., -1].exp()

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([state[:, 1:], tokens[:, None]], 1)


def last_labels(seed: int, frames: int, vocabulary: int, before: Tensor) -> LastLabels:
    """Random frames that depend on labels of ids up to 9."""
    generator = torch.Generator().manual_seed(seed)
    shape = (frames, *([10] * before.shape[1]), vocabulary + 1)
    return LastLabels((2 * torch.randn(shape, generator=generator)).log_softmax(-1), before)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    frames=st.integers(1, 5),
    vocabulary=st.integers(1, 3),
    band=st.integers(1, 3),
    depth=st.integers(1, 5),
    size=st.integers(1, 30),
    context=st.integers(1, 2),
    least=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    at_once=st.booleans(),
)
def test_lattice_finds_the_most_probable_prefixes(
    seed: int,
    frames: int,
    vocabulary: int,
    band: int,
    depth: int,
    size: int,
    context: int,
    least: float,
    at_once: bool,
) -> None:
    """On a CPU frame by frame, where it may leave out what is less probable than `least`; at once as on a GPU."""
    before = torch.tensor([[7, 8], [9, 5]])[:, 2 - context :]
    model = last_labels(seed, frames, vocabulary, before)
    with patch("drafter.devices.is_asynchronous", lambda device: at_once):
        tree = best_lattice_trie(model, before[:, -1], frames, band, depth, size, least=least)
    assert tree.tokens.shape == (2, size)
    assert tree.tokens[:, 0].tolist() == [8, 5]
    check_slice_contract(tree)
    for row in range(2):
        so_far = tuple(before[row].tolist())

        def frame(j: int, text: Prefix, so_far: Prefix = so_far) -> list[float]:
            return model.table[j - 1][(so_far + text)[-context:]].tolist()

        exact = prefix_probabilities(lattice_text_probabilities(frame, frames, vocabulary, band), depth)
        if at_once or not least:
            check_best(nodes(tree, row, depth), exact, size)
            continue
        for prefix, price in nodes(tree, row, depth).items():
            # Each depth lets go of no more than `least` at each frame after the first.
            assert exact[prefix] - depth * (band - 1) * least - 1e-5 <= price <= exact[prefix] + 1e-5


def test_a_narrow_beam_keeps_the_contract() -> None:
    before = torch.tensor([[3], [4]])
    tree = best_lattice_trie(last_labels(1, 6, 9, before), before[:, 0], 6, 2, 5, 24, beam=3)
    check_slice_contract(tree)
    assert [int(((tree.depths == depth) & (tree.tokens >= 0)).sum()) for depth in range(1, 6)] == [6] * 5


def test_a_repeat_is_ordinary_in_the_lattice() -> None:
    table = torch.tensor([0.98, 0.01, 0.01]).log().expand(3, 10, 3)
    tree = best_lattice_trie(LastLabels(table, torch.tensor([[5]])), torch.tensor([5]), 3, 1, 3, 4)
    assert tree.tokens.tolist() == [[5, 0, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 3]]


def test_with_a_band_of_one_the_blank_has_no_part() -> None:
    """Conditional distributions, one a depth: what follows a token depends on it, and on nothing else."""
    table = torch.full((2, 10, 3), -torch.inf)
    table[0, 9] = torch.tensor([0.7, 0.3, 0.0]).log()
    table[1, 0] = torch.tensor([0.1, 0.9, 0.0]).log()
    table[1, 1] = torch.tensor([0.8, 0.2, 0.0]).log()
    tree = best_lattice_trie(LastLabels(table, torch.tensor([[9]])), torch.tensor([9]), 2, 1, 2, 5)
    assert tree.tokens.tolist() == [[9, 0, 1, 1, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 3]]
    assert tree.log_probs.exp()[0].tolist() == pytest.approx([1.0, 0.7, 0.63, 0.3, 0.24])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 12), band=st.integers(1, 3), beam=st.sampled_from([None, 3]))
def test_dropping_what_cannot_be_in_a_tree_changes_none(seed: int, size: int, band: int, beam: int | None) -> None:
    """A row of the batch may be complete long before another."""
    before = torch.tensor([[3], [4], [5]])
    model = last_labels(seed, 6, 9, before)
    model.table[:, 3:5].mul_(4.0)
    model = LastLabels(model.table.log_softmax(-1), before)
    tree = best_lattice_trie(model, before[:, 0], 6, band, 6, size, beam)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice_on_host, "_promising", lambda prices, size, least: prices[-1] > 0)
        whole = best_lattice_trie(model, before[:, 0], 6, band, 6, size, beam)
    assert all(torch.equal(value, getattr(whole, name)) for name, value in vars(tree).items())


def test_what_is_less_probable_than_asked_for_is_not_extended() -> None:
    """Children of 0.7 and 0.3, and of each again."""
    table = torch.tensor([0.7, 0.3, 0.0]).log().expand(3, 10, 3)
    model = LastLabels(table, torch.tensor([[5]]))
    whole = best_lattice_trie(model, torch.tensor([5]), 3, 1, 3, 20)
    tree = best_lattice_trie(model, torch.tensor([5]), 3, 1, 3, 20, least=0.25)
    assert int((whole.tokens >= 0).sum()) == 1 + 2 + 4 + 8
    # 0.49 alone is extended among the four of depth 2: 0.21 and 0.09 are too little.
    prices = sorted(tree.log_probs[tree.tokens >= 0].exp().tolist(), reverse=True)
    assert prices == pytest.approx([1, 0.7, 0.49, 0.343, 0.3, 0.21, 0.21, 0.147, 0.09])
    check_slice_contract(tree)


def test_a_full_tree_asks_for_no_more_frames() -> None:
    asked: list[int] = []

    class Asked(LastLabels):
        def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(first)
            return super().score(first, stop, rows, state)

    best_lattice_trie(Asked(torch.zeros(6, 10, 10).log_softmax(-1), torch.tensor([[3]])), torch.tensor([3]), 6, 1, 6, 4)
    assert asked == [0]

""""""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter.ctc.prefix_search import best_trie
from tests.support.enumeration import prefix_probabilities, text_probabilities
from tests.support.properties import examples
from tests.support.trees import check_best, check_slice_contract, nodes


def random_frames(seed: int, batch: int, frames: int, vocabulary: int, sharpness: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, frames, vocabulary + 1, generator=generator) * sharpness
    return logits.log_softmax(-1)


@examples(60)
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
    """The four nodes that are found have the largest sum of all connected sets of four prefixes."""
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
    # Without the blank between them, the two frames that emit 0 collapse to one 0.
    merged = best_trie(probs[:, [0, 2, 1]].log(), torch.tensor([5]), 2, 3)
    assert nodes(merged, 0, 2).get((0, 0), 0.0) < 0.02


@pytest.mark.parametrize("certain", [0.0, -1e-9, -1e-4])
def test_probabilities_fall_along_a_path_of_sure_tokens(certain: float) -> None:
    """All tokens of the path have probability 1 up to rounding; nothing else survives float32."""
    log_probs = torch.full((1, 8, 33), -120.0)
    for frame in range(8):
        log_probs[0, frame, frame % 3] = certain
    tree = best_trie(log_probs, torch.tensor([1]), 6, 12)
    check_slice_contract(tree)
    assert tree.tokens[0, :7].tolist() == [1, 0, 1, 2, 0, 1, 2]
    assert tree.depths[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]


@examples(30)
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


@examples(30)
@given(seed=st.integers(0, 10_000), sharpness=st.sampled_from([1.0, 3.0]), candidates=st.integers(1, 40))
def test_candidates_miss_only_what_the_bound_allows(seed: int, sharpness: float, candidates: int) -> None:
    log_probs = random_frames(seed, 1, 6, 40, sharpness)
    pending = torch.tensor([0])
    full = nodes(best_trie(log_probs, pending, 4, 16), 0, 4)
    some = nodes(best_trie(log_probs, pending, 4, 16, candidates=candidates), 0, 4)
    sums = log_probs.exp()[0, :, :-1].sum(0).sort(descending=True).values.tolist()
    bound = sums[candidates] if candidates < 40 else 0.0
    for prefix, prob in full.items():
        if prob > bound * 1.0001:
            assert some[prefix] == pytest.approx(prob, rel=1e-4)


def test_a_row_does_not_see_its_batch() -> None:
    log_probs = random_frames(3, 4, 8, 100, 2.0)
    pending = torch.arange(4)
    together = best_trie(log_probs, pending, 6, 20, candidates=32)
    for row in range(4):
        alone = best_trie(log_probs[row : row + 1], pending[row : row + 1], 6, 20, candidates=32)
        assert nodes(together, row, 6).keys() == nodes(alone, 0, 6).keys()


def test_a_tree_of_one_node_is_its_root() -> None:
    assert best_trie(random_frames(0, 2, 4, 5, 1.0), torch.tensor([1, 2]), 3, 1).tokens.tolist() == [[1], [2]]

""""""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.ctc.prefix_search import collapse, rank_paths, static_tree
from tests.support.enumeration import prefix_probabilities, text_probabilities
from tests.support.properties import examples
from tests.support.trees import check_slice_contract, nodes


def test_collapse_removes_repeats_then_blanks_and_closes_gaps() -> None:
    blank = 9
    alignments = torch.tensor([[9, 1, 1, 9, 1, 2], [9, 9, 9, 9, 9, 9], [3, 3, 4, 4, 3, 9]])
    probs = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]]).expand(3, -1)
    paths, found = collapse(alignments, probs, blank, 3)
    assert paths.tolist() == [[1, 1, 2], [-1, -1, -1], [3, 4, 3]]
    assert found[0].tolist() == [-2.0, -5.0, -6.0]
    assert bool((found[1] == -torch.inf).all())


def test_collapse_drops_what_is_too_deep() -> None:
    paths, probs = collapse(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), 9, 2)
    assert paths.tolist() == [[0, 1]]
    assert probs.tolist() == [[-1.0, -2.0]]


def test_rank_paths_are_distinct_and_start_with_the_best() -> None:
    paths = rank_paths(3, 2, 100)
    assert paths[:4] == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert len(paths) == len({tuple(path) for path in paths}) == 8


@examples(30)
@given(seed=st.integers(0, 9999), size=st.integers(2, 30), frames=st.integers(1, 5))
def test_static_tree_is_a_trie_worth_no_more_than_its_prefixes(seed: int, size: int, frames: int) -> None:
    """Depth is the position, duplicates are merged, and one alignment is never likelier than all of them."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(1, frames, 4, generator=generator).log_softmax(-1)
    tree = static_tree(log_probs, torch.tensor([5]), 4, size, alignments=200)
    check_slice_contract(tree)
    paths = [tuple(path) for path in tree.paths(4)[0][tree.log_probs[0] > -torch.inf].tolist()]
    assert len(paths) == len(set(paths))
    exact = prefix_probabilities(text_probabilities(log_probs[0]), 4)
    for prefix, prob in nodes(tree, 0, 4).items():
        assert prob <= exact[prefix] * 1.0001


def test_duplicates_take_the_largest_probability() -> None:
    probs = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]])
    tree = static_tree(probs.log(), torch.tensor([5]), 2, 4, top_k=2)
    # 0ε (.6), 00 (.6) and ε0 (.4 · .3) all collapse to 0.
    assert tree.tokens.tolist() == [[5, 0, -1, -1]]
    assert tree.log_probs.exp()[0, 1].item() == pytest.approx(0.6)


def test_without_a_blank_a_frame_is_a_depth() -> None:
    """Nothing is collapsed: repeats and the last symbol are ordinary tokens."""
    probs = torch.tensor([[[0.6, 0.1, 0.3], [0.7, 0.1, 0.2]]])
    tree = static_tree(probs.log(), torch.tensor([5]), 2, 6, blank=False, top_k=2)
    # 00 (.42), 20 (.21), 02 (.12) and 22 (.06), and their first tokens.
    assert tree.tokens.tolist() == [[5, 0, 0, 2, 0, 2]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 3, 1]]
    assert tree.log_probs.exp()[0].tolist() == pytest.approx([1.0, 0.6, 0.42, 0.3, 0.21, 0.12])


@examples(30)
@given(seed=st.integers(0, 9999), size=st.integers(2, 30), frames=st.integers(1, 5))
def test_without_a_blank_probabilities_are_products(seed: int, size: int, frames: int) -> None:
    log_probs = torch.randn(2, frames, 6, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    tree = static_tree(log_probs, torch.tensor([5, 6]), frames, size, blank=False)
    check_slice_contract(tree)
    for row in range(2):
        for prefix, prob in nodes(tree, row, frames).items():
            product = sum(log_probs[row, depth, token].item() for depth, token in enumerate(prefix))
            assert prob == pytest.approx(math.exp(product), rel=1e-4)


@pytest.mark.parametrize("blank", [True, False])
def test_no_path_is_deeper_than_asked(blank: bool) -> None:
    log_probs = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert int(static_tree(log_probs, torch.tensor([5]), 2, 30, blank=blank).depths.max()) == 2

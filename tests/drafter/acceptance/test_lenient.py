from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter.acceptance.contract import walk
from drafter.acceptance.lenient import lenient_walk
from drafter.tree.token_tree import PAD_TOKEN, TokenTree
from tests.drafter.acceptance.test_contract import random_trees, tree_of
from tests.support.properties import examples

FORK = tree_of([7, 3, 5, 4], [0, 0, 0, 1])
"""Root 7 with children 3 and 5, and 4 below 3."""


def walked(
    choices: list[int], lenient: list[int], log_probs: tuple[float, ...] = (0, -1, -1, -1), tree: TokenTree = FORK
) -> tuple[list[int], list[int]]:
    """The tokens that the walk emits, and the places of the lenient ones."""
    marks, prices = torch.tensor([lenient]).bool(), torch.tensor([log_probs]).float()
    step = lenient_walk(tree, torch.tensor([choices]), marks, prices, depth=2)
    assert step.lenient is not None
    count = int(step.count)
    assert step.path[0, count + 1 :].eq(0).all()
    return step.tokens[0, : count + 1].tolist(), step.lenient[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("choices", "lenient", "tokens", "marks"),
    [
        ([6, 4, 1, 9], [0, 0, 0, 0], [6], []),  # nothing is allowed but equality
        ([6, 4, 1, 9], [0, 1, 1, 0], [3, 4, 9], [0]),  # the deepest of two lenient ways
        ([5, 4, 1, 9], [0, 1, 1, 0], [5, 1], []),  # the base's own choice wins over a deeper way
        ([6, 2, 1, 9], [0, 1, 0, 1], [3, 4, 9], [0, 1]),  # one after another
        ([3, 2, 1, 9], [0, 0, 0, 1], [3, 4, 9], [1]),
        ([6, 4, 1, 9], [0, 0, 1, 1], [5, 1], [0]),  # node 3 is allowed, but its parent is not
        ([6, 4, 1, 9], [1, 0, 0, 0], [6], []),  # the root is no draft
    ],
)
def test_which_way_the_walk_goes(choices: list[int], lenient: list[int], tokens: list[int], marks: list[int]) -> None:
    assert walked(choices, lenient) == (tokens, marks)


def test_among_equals_the_base_decides() -> None:
    both = tree_of([7, 3, 5], [0, 0, 0])
    assert walked([6, 1, 2], [0, 1, 1], (0, -2.0, -0.5), both) == ([5, 2], [0])
    assert walked([6, 1, 2], [0, 1, 1], (0, -0.5, -2.0), both) == ([3, 1], [0])
    assert walked([6, 1, 2], [0, 1, 1], (0, -torch.inf, -torch.inf), both) == ([3, 1], [0])


def test_padding_is_never_accepted() -> None:
    padded = tree_of([7, 3, PAD_TOKEN, PAD_TOKEN], [0, 0, 0, 0])
    assert walked([6, 1, 1, 1], [1, 0, 1, 1], tree=padded) == ([6], [])


def marks_of(tree: TokenTree, seed: int, share: float) -> Tensor:
    return torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed)) < share


@examples(60)
@given(seed=st.integers(0, 10_000), few=st.floats(0, 1), more=st.floats(0, 1))
def test_without_leniency_it_is_the_exact_walk_and_with_more_of_it_no_path_is_shorter(
    seed: int, few: float, more: float
) -> None:
    tree = random_trees(3, 9, 3, seed)
    choices = torch.randint(3, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    prices = -torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed + 1))
    exact = walk(tree, choices, tree.ancestors(), 8)
    strict = lenient_walk(tree, choices, torch.zeros_like(choices).bool(), prices, 8)
    assert strict.count.equal(exact.count)
    assert strict.path.equal(exact.path)
    assert strict.tokens.equal(exact.tokens)
    assert strict.lenient is not None
    assert not strict.lenient.any()
    few, more = sorted((few, more))
    less, most = (lenient_walk(tree, choices, marks_of(tree, seed, share), prices, 8) for share in (few, more))
    assert (exact.count <= less.count).all()
    assert (less.count <= most.count).all()

""""""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.tree.token_tree import best_product_trie, likeliest_chain
from tests.support.trees import Prefix, check_best, check_slice_contract, nodes


def products(log_probs: Tensor) -> dict[Prefix, float]:
    """Probability of every prefix under independent distributions `[U, V]`."""
    depth, vocabulary = log_probs.shape
    table = log_probs.double().tolist()
    return {
        prefix: math.exp(sum(table[place][token] for place, token in enumerate(prefix)))
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 4),
    vocabulary=st.integers(1, 5),
    size=st.integers(1, 40),
    sharpness=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
)
def test_finds_the_most_probable_prefixes(seed: int, depth: int, vocabulary: int, size: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (torch.randn(2, depth, vocabulary, generator=generator) * sharpness).log_softmax(-1)
    tree = best_product_trie(log_probs, torch.tensor([7, 8]), size)
    assert tree.tokens.shape == (2, size)
    assert tree.tokens[:, 0].tolist() == [7, 8]
    check_slice_contract(tree)
    for row in range(2):
        exact = products(log_probs[row])
        found = nodes(tree, row, depth)
        check_best(found, exact, size)
        # Any leading slice is the best tree of its size.
        check_best(nodes(tree.leading(size // 2 + 1), row, depth), exact, size // 2 + 1)


def test_literal_tree() -> None:
    probs = torch.tensor([[[0.6, 0.4], [0.1, 0.9]]])
    tree = best_product_trie(probs.log(), torch.tensor([9]), 6)
    assert tree.tokens.tolist() == [[9, 0, 1, 1, 1, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 3, 1]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.log_probs.exp()[0].tolist() == pytest.approx([1.0, 0.6, 0.54, 0.4, 0.36, 0.06])


def test_impossible_tokens_leave_padding() -> None:
    log_probs = torch.tensor([[[0.0, -torch.inf], [-torch.inf, 0.0]]])
    tree = best_product_trie(log_probs, torch.tensor([3]), 5)
    assert tree.tokens.tolist() == [[3, 0, 1, -1, -1]]
    check_slice_contract(tree)


def test_a_chain_has_the_likeliest_token_of_each_depth() -> None:
    probs = torch.tensor([[[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], [[0.1, 0.1, 0.8], [0.0, 1.0, 0.0]]])
    tree = likeliest_chain(probs.log(), torch.tensor([7, 8]), 4)
    assert tree.tokens.tolist() == [[7, 1, 0, -1], [8, 2, 1, -1]]
    assert tree.parents.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]
    assert torch.allclose(tree.log_probs.exp(), torch.tensor([[1, 0.5, 0.3, 0], [1, 0.8, 0.8, 0]]))
    assert torch.equal(likeliest_chain(probs.log(), torch.tensor([7, 8]), 2).tokens, tree.tokens[:, :2])

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.tree.token_tree import PAD_TOKEN, TokenTree, from_nodes, from_paths, merge
from tests.support.trees import FORK

PENDING = torch.tensor([7])


def test_from_nodes_sorts_by_probability_and_renumbers_parents() -> None:
    tree = from_nodes(
        PENDING,
        tokens=torch.tensor([[5, 3, 4, 9]]),
        parents=torch.tensor([[-1, -1, 0, 1]]),
        depths=torch.tensor([[1, 1, 2, 2]]),
        log_probs=torch.tensor([[-1.0, -0.5, -2.0, -9.0]]),
        size=4,
    )
    for field, expected in vars(FORK).items():
        assert torch.equal(getattr(tree, field), expected), field


def test_from_nodes_pads_what_is_missing() -> None:
    tree = from_nodes(
        PENDING,
        torch.tensor([[3, 4]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([[1, 2]]),
        torch.tensor([[-1, -torch.inf]]),
        5,
    )
    assert tree.tokens.tolist() == [[7, 3, PAD_TOKEN, PAD_TOKEN, PAD_TOKEN]]
    assert tree.log_probs.tolist() == [[0.0, -1.0, -torch.inf, -torch.inf, -torch.inf]]
    assert tree.parents.tolist() == [[0, 0, 0, 0, 0]]


def test_from_paths_merges_equal_prefixes_at_the_larger_probability() -> None:
    paths = torch.tensor([[[5, 4, 1], [5, 4, 2], [3, PAD_TOKEN, PAD_TOKEN]]])
    probs = torch.tensor([[[-1.0, -2.0, -4.0], [-0.8, -2.5, -3.0], [-0.9, -torch.inf, -torch.inf]]])
    tree = from_paths(PENDING, paths, probs, 6)
    assert tree.tokens.tolist() == [[7, 5, 3, 4, 2, 1]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 3, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3, 3]]
    assert torch.allclose(tree.log_probs, torch.tensor([[0.0, -0.8, -0.9, -2.0, -3.0, -4.0]]))


def test_merge_keeps_every_path_at_the_larger_probability() -> None:
    other = from_paths(PENDING, torch.tensor([[[5, 6]]]), torch.tensor([[[-0.1, -0.2]]]), 3)
    tree = merge([FORK, other], depth=2, size=6)
    assert tree.tokens.tolist() == [[7, 5, 6, 3, 4, PAD_TOKEN]]
    assert torch.allclose(tree.log_probs[:, :5], torch.tensor([[0.0, -0.1, -0.2, -0.5, -2.0]]))


def assert_contract(tree: TokenTree) -> None:
    """Falling probabilities, parents before children, siblings distinct, padding last."""
    for row in range(tree.tokens.shape[0]):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        probs, depths = tree.log_probs[row].tolist(), tree.depths[row].tolist()
        real = [i for i, token in enumerate(tokens) if token != PAD_TOKEN]
        assert real == list(range(len(real)))
        assert all(a >= b for a, b in pairwise(probs))
        assert all(parents[i] < i and depths[i] == depths[parents[i]] + 1 for i in real[1:])
        assert len({(parents[i], tokens[i]) for i in real[1:]}) == len(real) - 1


@settings(max_examples=60)
@given(st.data())
def test_from_paths_makes_the_trie_of_a_dictionary(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 4))
    paths = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=depth), min_size=1, max_size=6), label="paths"
    )
    padded = torch.tensor([[p + [PAD_TOKEN] * (depth - len(p)) for p in paths]])
    steps = torch.tensor(data.draw(st.lists(st.floats(0.1, 2), min_size=len(paths), max_size=len(paths))))
    probs = -(steps[None, :, None] * torch.arange(1, depth + 1))
    probs = probs.masked_fill(padded == PAD_TOKEN, -torch.inf)
    tree = from_paths(PENDING, padded, probs, size=1 + len(paths) * depth)
    assert_contract(tree)
    expected: dict[tuple[int, ...], float] = {}
    for path, prob in zip(paths, probs[0].tolist(), strict=True):
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            expected[prefix] = max(expected.get(prefix, -float("inf")), prob[end - 1])
    found = {
        tuple(t for t in path if t != PAD_TOKEN): prob
        for path, prob in zip(tree.paths(depth)[0].tolist(), tree.log_probs[0].tolist(), strict=True)
        if prob > -float("inf")
    }
    del found[()]
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-5 for key in expected)
    for size in range(1, tree.size + 1):
        assert_contract(tree.leading(size))

"""Draft trees, tries of paths, and best-first growth against enumeration."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter import devices
from drafter.tree.token_tree import (
    PAD_TOKEN,
    Frontier,
    TokenTree,
    bare_trees,
    best_first_trie,
    best_product_trie,
    from_nodes,
    from_paths,
    likeliest_chain,
    merge,
    most_places,
    root_only,
)
from tests.support.properties import examples
from tests.support.trees import FORK, Prefix, check_best, check_slice_contract, nodes


class LastTwo:
    """A model whose next token depends on the last two nodes of a path, which it finds by the ancestors.

    Args:
        table: `[V, V, V]` logits of the next token after two tokens.
        children: K.
    """

    def __init__(self, table: Tensor, children: int) -> None:
        self.table, self.children, self.calls, self.ran = table.log_softmax(-1), children, 0, 0

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.ran = max(self.ran, frontier.tokens.shape[1])
        found = []
        for row, node in itertools.product(range(len(frontier.tokens)), range(frontier.real.shape[1])):
            above = frontier.ancestors[row, frontier.first + node].nonzero()[:, 0]
            path = frontier.tokens[row, above][frontier.depths[row, above].argsort()].tolist()
            if frontier.real[row, node]:
                assert len(path) == frontier.depths[row, frontier.first + node] + 1
                found.append(self.table[([0, *path])[-2], path[-1]])
            else:
                found.append(torch.full_like(self.table[0, 0], torch.nan))
        best = torch.stack(found).view(*frontier.real.shape, -1).topk(self.children)
        return best.values, best.indices


def exact_prefixes(model: LastTwo, root: int, depth: int) -> dict[Prefix, float]:
    size, found = len(model.table), dict[Prefix, float]()
    for length in range(1, depth + 1):
        for path in itertools.product(range(size), repeat=length):
            text, log_prob = (0, root, *path), 0.0
            for at in range(length):
                log_prob += float(model.table[text[at], text[at + 1], text[at + 2]])
            found[path] = torch.tensor(log_prob).exp().item()
    return found


def table(seed: int, vocabulary: int) -> Tensor:
    return 2 * torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))


@examples(40)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(1, 4), depth=st.integers(1, 4), size=st.integers(1, 24))
def test_with_a_whole_beam_it_finds_the_most_probable_prefixes(
    seed: int, vocabulary: int, depth: int, size: int
) -> None:
    model = LastTwo(table(seed, vocabulary), vocabulary)
    roots = torch.tensor([0, vocabulary - 1])
    tree = best_first_trie(model, roots, depth, size, beam=size)
    assert tree.tokens.shape == (2, size)
    check_slice_contract(tree)
    assert model.calls <= depth
    for row, root in enumerate(roots.tolist()):
        check_best(nodes(tree, row, depth), exact_prefixes(model, root, depth), size)


@examples(40)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 6), size=st.integers(2, 20), beam=st.integers(1, 4))
def test_a_narrow_beam_keeps_the_contract_and_its_places(seed: int, depth: int, size: int, beam: int) -> None:
    model = LastTwo(table(seed, 5), 3)
    tree = best_first_trie(model, torch.tensor([1, 4]), depth, size, beam)
    check_slice_contract(tree)
    assert model.ran <= most_places(depth, size, beam)
    for row, root in enumerate([1, 4]):
        exact = exact_prefixes(model, root, min(depth, 3))
        for prefix, prob in nodes(tree, row, min(depth, 3)).items():
            if len(prefix) < 3:
                assert prob == pytest.approx(exact[prefix], rel=1e-3)


def test_a_chain_by_hand() -> None:
    """After 0 comes 1 with 0.6 and 2 with 0.4, after 1 comes 2 with 0.9, after 2 comes 0 for sure."""
    after = torch.tensor([[1e-9, 0.6, 0.4], [0.05, 0.05, 0.9], [1.0, 1e-9, 1e-9]]).log()

    def conditionals(frontier: Frontier) -> tuple[Tensor, Tensor]:
        best = after[frontier.tokens[:, frontier.first :]].topk(2)
        return best.values, best.indices

    tree = best_first_trie(conditionals, torch.tensor([0]), depth=3, size=6, beam=2)
    assert tree.tokens.tolist() == [[0, 1, 2, 0, 2, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 2, 0, 4]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 1, 2]]
    expected = torch.tensor([[1.0, 0.6, 0.54, 0.54, 0.4, 0.4]]).log()
    assert torch.allclose(tree.log_probs, expected, atol=1e-6)


def test_improbable_prefixes_are_not_extended_on_a_cpu() -> None:
    model = LastTwo(table(3, 4), 4)
    free = best_first_trie(model, torch.tensor([1]), 6, 40, beam=8)
    calls, model.calls = model.calls, 0
    cut = best_first_trie(model, torch.tensor([1]), 6, 40, beam=8, least=0.5)
    assert model.calls < calls
    kept, possible = nodes(cut, 0, 6), nodes(free, 0, 6)
    assert all(len(prefix) == 1 or kept[prefix[:-1]] > 0.5 for prefix in kept)
    assert {prefix for prefix in possible if len(prefix) == 1 or possible[prefix[:-1]] > 0.5} <= kept.keys()


def test_numbers_that_are_not_finite_have_no_children() -> None:
    def conditionals(frontier: Frontier) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(2).expand(*frontier.real.shape, 2)
        poisoned = (frontier.tokens[:, frontier.first :] == 1)[..., None]
        return torch.full(tokens.shape, -0.7).masked_fill(poisoned, torch.nan), tokens

    tree = best_first_trie(conditionals, torch.tensor([0, 1]), depth=3, size=8, beam=4)
    check_slice_contract(tree)
    assert all(1 not in prefix[:-1] for prefix in nodes(tree, 0, 3))
    assert nodes(tree, 1, 3) == {}


def test_on_a_gpu_the_shapes_depend_on_no_number() -> None:
    """The same forwards whatever is likely, and the best tree of that beam all the same."""
    shapes: list[list[int]] = []
    for seed in (1, 2):
        model, seen = LastTwo(table(seed, 5), 3), list[int]()

        def watched(frontier: Frontier, model: LastTwo = model, seen: list[int] = seen) -> tuple[Tensor, Tensor]:
            seen.append(frontier.tokens.shape[1])
            return model(frontier)

        arguments: dict[str, Any] = {"pending": torch.tensor([1, 4]), "depth": 4, "size": 11, "beam": 10}
        on_cpu = best_first_trie(model, **arguments)
        with mock.patch.object(devices, "is_asynchronous", return_value=True):
            on_gpu = best_first_trie(watched, **arguments)
        assert torch.equal(on_cpu.tokens, on_gpu.tokens)
        shapes.append(seen)
    assert shapes[0] == shapes[1]


def test_ancestors_of_a_fork() -> None:
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    assert torch.equal(FORK.ancestors()[0], expected)
    assert torch.equal(FORK.ancestors(depth=2)[0], expected)


def test_ancestors_of_a_chain_reach_the_root() -> None:
    parents = torch.tensor([[0, 0, 1, 2, 3, 4, 5]])
    chain = TokenTree(parents, parents, torch.arange(7)[None], -torch.arange(7.0)[None])
    assert torch.equal(chain.ancestors(depth=6)[0], torch.ones(7, 7).tril().bool())


def test_paths_spell_out_each_node() -> None:
    assert FORK.paths(2).tolist() == [[[PAD_TOKEN, PAD_TOKEN], [3, PAD_TOKEN], [5, PAD_TOKEN], [5, 4]]]


def test_the_first_child_comes_first() -> None:
    two = TokenTree(*(part.expand(2, -1) for part in vars(FORK).values()))
    assert two.trimmed(torch.tensor([4, 2])).first_children().tolist() == [[1, 4, 3, 4], [1, 4, 4, 4]]


def test_bare_trees_repeat_the_root() -> None:
    trees = bare_trees(torch.tensor([7, 8]), 3)
    assert trees.tokens.tolist() == [[7] * 3, [8] * 3]
    assert trees.parents.tolist() == trees.depths.tolist() == [[0] * 3] * 2
    assert trees.log_probs.tolist() == [[0.0] * 3] * 2


def test_root_only_is_plain_decoding() -> None:
    tree = root_only(torch.tensor([7, 8]))
    assert tree.tokens.tolist() == [[7], [8]]
    assert tree.size == 1


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


@examples(60)
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


def products(log_probs: Tensor) -> dict[Prefix, float]:
    """Probability of every prefix under independent distributions `[U, V]`."""
    depth, vocabulary = log_probs.shape
    table = log_probs.double().tolist()
    return {
        prefix: math.exp(sum(table[place][token] for place, token in enumerate(prefix)))
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


@examples(60)
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


def test_no_node_is_deeper_than_its_row_allows() -> None:
    """Of 0 → 1 → 3, 0 → 2 → 4 the second row keeps one level, and the third none."""
    part = [[7, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 1, 1, 2, 2], [0.0, -1.0, -2.0, -3.0, -4.0]]
    tree = TokenTree(*(torch.tensor([one] * 3) for one in part))
    order = torch.tensor([0, 1, 3, 2, 4])  # by another probability, a deep node comes before a shallow one
    places = order.argsort()
    mixed = TokenTree(tree.tokens[:, order], places[tree.parents[:, order]], tree.depths[:, order], tree.log_probs)
    found = mixed.no_deeper(torch.tensor([2, 1, 0]))
    assert found.tokens.tolist() == [[7, 1, 3, 2, 4], [7, 1, 2, -1, -1], [7, -1, -1, -1, -1]]
    assert found.parents.tolist() == [[0, 0, 1, 0, 3], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert found.depths.tolist() == [[0, 1, 2, 1, 2], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert found.log_probs[1].tolist() == [0.0, -1.0, -3.0, -math.inf, -math.inf]

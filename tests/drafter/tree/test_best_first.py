"""Best-first growth against enumeration."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter import devices
from drafter.tree.token_tree import Frontier, best_first_trie, most_places
from tests.support.trees import Prefix, check_best, check_slice_contract, nodes


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


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 6), size=st.integers(2, 20), beam=st.integers(1, 4))
def test_a_narrow_beam_keeps_the_contract_and_its_places(seed: int, depth: int, size: int, beam: int) -> None:
    model = LastTwo(table(seed, 5), 3)
    tree = best_first_trie(model, torch.tensor([1, 4]), depth, size, beam)
    check_slice_contract(tree)
    assert model.ran <= most_places(depth, beam)
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

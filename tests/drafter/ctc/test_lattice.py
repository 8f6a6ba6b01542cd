"""The lattice search against enumeration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter.ctc.lattice import best_lattice_trie
from tests.support.enumeration import lattice_text_probabilities, prefix_probabilities
from tests.support.properties import examples
from tests.support.trees import Prefix, check_best, check_same_trees, check_slice_contract, nodes


@dataclass(frozen=True)
class LastLabels:
    """Frames that depend on the last c labels: a `table` `[T, 10, ..., V + 1]`, and the labels `before` `[B, c]`."""

    table: Tensor
    before: Tensor

    def start(self) -> Tensor:
        return self.before

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.stack([self.table[j][state.unbind(-1)] for j in range(first, stop)], 1)
        return log_probs[..., :-1].softmax(-1), log_probs[..., -1].exp()

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([state[:, 1:], tokens[:, None]], 1)


def last_labels(seed: int, frames: int, vocabulary: int, before: Tensor) -> LastLabels:
    """Random frames that depend on labels with ids up to 9."""
    generator = torch.Generator().manual_seed(seed)
    shape = (frames, *([10] * before.shape[1]), vocabulary + 1)
    return LastLabels((2 * torch.randn(shape, generator=generator)).log_softmax(-1), before)


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    frames=st.integers(1, 5),
    vocabulary=st.integers(1, 3),
    band=st.integers(1, 3),
    depth=st.integers(1, 5),
    size=st.integers(1, 30),
    context=st.integers(1, 2),
)
def test_lattice_finds_the_most_probable_prefixes(
    seed: int,
    frames: int,
    vocabulary: int,
    band: int,
    depth: int,
    size: int,
    context: int,
) -> None:
    before = torch.tensor([[7, 8], [9, 5]])[:, 2 - context :]
    model = last_labels(seed, frames, vocabulary, before)
    tree = best_lattice_trie(model, before[:, -1], frames, band, depth, size)
    assert tree.tokens.shape == (2, size)
    assert tree.tokens[:, 0].tolist() == [8, 5]
    check_slice_contract(tree)
    for row in range(2):
        so_far = tuple(before[row].tolist())

        def frame(j: int, text: Prefix, so_far: Prefix = so_far) -> list[float]:
            return model.table[j - 1][(so_far + text)[-context:]].tolist()

        exact = prefix_probabilities(lattice_text_probabilities(frame, frames, vocabulary, band), depth)
        check_best(nodes(tree, row, depth), exact, size)


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


def test_with_a_band_of_one_blanks_do_not_matter() -> None:
    """The search is over conditional distributions, one for each depth."""
    table = torch.full((2, 10, 3), -torch.inf)
    table[0, 9] = torch.tensor([0.7, 0.3, 0.0]).log()
    table[1, 0] = torch.tensor([0.1, 0.9, 0.0]).log()
    table[1, 1] = torch.tensor([0.8, 0.2, 0.0]).log()
    tree = best_lattice_trie(LastLabels(table, torch.tensor([[9]])), torch.tensor([9]), 2, 1, 2, 5)
    assert tree.tokens.tolist() == [[9, 0, 1, 1, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 3]]
    assert tree.log_probs.exp()[0].tolist() == pytest.approx([1.0, 0.7, 0.63, 0.3, 0.24])


def test_what_is_less_probable_than_asked_for_is_not_extended() -> None:
    """Every node has children of probabilities 0.7 and 0.3."""
    table = torch.tensor([0.7, 0.3, 0.0]).log().expand(3, 10, 3)
    model = LastLabels(table, torch.tensor([[5]]))
    whole = best_lattice_trie(model, torch.tensor([5]), 3, 1, 3, 20)
    tree = best_lattice_trie(model, torch.tensor([5]), 3, 1, 3, 20, least=0.25)
    assert int((whole.tokens >= 0).sum()) == 1 + 2 + 4 + 8
    # Of the four nodes of depth 2 only 0.49 is extended: 0.21 and 0.09 are below 0.25.
    probs = sorted(tree.log_probs[tree.tokens >= 0].exp().tolist(), reverse=True)
    assert probs == pytest.approx([1, 0.7, 0.49, 0.343, 0.3, 0.21, 0.21, 0.147, 0.09])
    check_slice_contract(tree)


@examples(40)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    size=st.integers(2, 40),
    band=st.integers(1, 3),
    beam=st.sampled_from([None, 3, 10]),
)
def test_dropping_what_cannot_be_in_a_tree_changes_none(
    seed: int, rows: int, size: int, band: int, beam: int | None
) -> None:
    """A CPU drops it and a GPU does not. One row's tree may be complete long before another's."""
    before = torch.tensor([[3], [4], [5]])[:rows]
    model = last_labels(seed, 6, 9, before)
    model.table[:, 3:5].mul_(4.0)  # distributions are much sharper after some labels than after others
    model = LastLabels(model.table.log_softmax(-1), before)
    tree = best_lattice_trie(model, before[:, 0], 6, band, 6, size, beam)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.devices.is_asynchronous", lambda device: True)
        whole = best_lattice_trie(model, before[:, 0], 6, band, 6, size, beam)
    check_same_trees(tree, whole, 6)


def test_a_full_tree_asks_for_no_more_frames() -> None:
    asked: list[int] = []

    class Asked(LastLabels):
        def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(first)
            return super().score(first, stop, rows, state)

    best_lattice_trie(Asked(torch.zeros(6, 10, 10).log_softmax(-1), torch.tensor([[3]])), torch.tensor([3]), 6, 1, 6, 4)
    assert asked == [0]

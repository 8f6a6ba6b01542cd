"""What is new in an arm begins without effect, and a selector's trees are the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from drafter.ctc.head import CTCHead
from drafter.ctc.lattice import best_lattice_trie
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from studies.head_arms import PairHead, PairLattice, read_layers, replayed, with_labels
from tests.support.enumeration import lattice_text_probabilities, prefix_probabilities
from tests.support.heads import DEPTH, make_head, random_texts
from tests.support.trees import Prefix, check_best, check_same_trees, nodes

TOKENS, ANCHORS = torch.arange(2, 14).view(1, -1), torch.tensor([[5, 9]])


@pytest.fixture
def head(tiny_base: BaseModel) -> CTCHead:
    made = make_head(tiny_base, "context 2, in part")
    assert isinstance(made, CTCHead)
    return made


def drafted(head: CTCHead, base: BaseModel, layers: Sequence[int] = (-1,)) -> TokenTree:
    hidden = torch.randn(1, TOKENS.shape[1], base.hidden_size, generator=torch.Generator().manual_seed(0))
    return head.trees_at(base, TOKENS, hidden.repeat(1, 1, len(layers)), ANCHORS, 9)


@torch.no_grad()
def test_every_arm_begins_with_the_drafts_that_ship(head: CTCHead, tiny_base: BaseModel) -> None:
    shipped = drafted(head, tiny_base)
    check_same_trees(drafted(with_labels(head, 4, tiny_base), tiny_base), shipped, DEPTH)
    with patch("drafter.ctc.head.FrameLattice", PairLattice):
        check_same_trees(drafted(PairHead(head, tiny_base), tiny_base), shipped, DEPTH)
    read_layers(head, (0, 1))
    check_same_trees(drafted(head, tiny_base, head.hidden_layers), shipped, DEPTH)


@torch.no_grad()
def test_a_selector_moves_probability_among_a_frames_candidates(head: CTCHead, tiny_base: BaseModel) -> None:
    pairs = PairHead(head, tiny_base)
    pairs.left.weight.normal_()
    logits, before = torch.randn(2, 3, len(pairs.right.weight)), torch.tensor([3, 7])
    scored = pairs.again(logits, before)
    best = logits.topk(16, -1).indices
    moved = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
    assert torch.equal(scored[~moved], logits[~moved])
    assert not torch.equal(scored[moved], logits[moved])
    torch.testing.assert_close(scored.logsumexp(-1), logits.logsumexp(-1))
    by_hand = logits.gather(-1, best) + torch.einsum("mfkr,mr->mfk", pairs.right(best), pairs.left(before))
    torch.testing.assert_close(scored.gather(-1, best).softmax(-1), by_hand.softmax(-1))


@torch.no_grad()
def test_a_selectors_trees_are_the_most_probable_by_enumeration(head: CTCHead, tiny_base: BaseModel) -> None:
    pairs = PairHead(head, tiny_base)
    pairs.left.weight.normal_(std=3)
    frames, band, size = 2, 1, 12
    states = torch.randn(1, frames, tiny_base.hidden_size)
    recent = torch.tensor([[4, 6]])
    lattice = PairLattice(pairs, tiny_base, states, recent)
    tree = best_lattice_trie(lattice, recent[:, -1], frames, band, frames, size)
    vocabulary = len(pairs.right.weight)

    def frame(j: int, text: Prefix) -> list[float]:
        labels = torch.tensor(
            [[*recent[0].tolist(), *pairs.base_tokens(torch.tensor(text, dtype=torch.long)).tolist()][-2:]]
        )
        probs, blank = lattice.score(j - 1, j, torch.tensor([0]), labels)
        return [*(probs[0, 0] * (1 - blank[0, 0])).log().tolist(), blank[0, 0].log().item()]

    exact = prefix_probabilities(lattice_text_probabilities(frame, frames, vocabulary, band), frames)
    check_best(nodes(tree, 0, frames), exact, size)


@torch.no_grad()
def test_replayed_anchors_are_where_steps_begin(head: CTCHead, tiny_base: BaseModel) -> None:
    texts = sorted(random_texts(3), key=lambda text: len(text.tokens))
    texts = [
        type(text)(text.tokens, text.prompt_length, torch.randn(len(text.tokens), tiny_base.hidden_size))
        for text in texts
    ]
    for before, after in zip(texts, replayed(head, tiny_base, texts), strict=True):
        assert after.anchors[0] == before.anchors[0]
        assert set(after.anchors) <= set(before.anchors)
        assert list(after.anchors) == sorted(set(after.anchors))

"""The native searches find the trees of those in PyTorch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.ctc.head import CTCHead, FrameLattice, NativeSearch
from drafter.ctc.lattice import best_lattice_trie
from drafter.ctc.prefix_search import best_trie
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.heads import DEPTH, KINDS, make_head
from tests.support.properties import examples
from tests.support.trees import check_same_trees, check_slice_contract, nodes

KINDS_WITH_CONTEXT = sorted(kind for kind, (_, own) in KINDS.items() if own.get("label_context"))
KINDS_WITHOUT = sorted(
    kind
    for kind, (algorithm, own) in KINDS.items()
    if algorithm == "ctc" and not own.get("label_context") and own.get("loss") != "ce"
)


def sharp_head(base: BaseModel, kind: str, seed: int) -> CTCHead:
    """A head whose distributions are far from even, and whose blanks are not rare."""
    head = make_head(base, kind, seed)
    assert isinstance(head, CTCHead)
    head.norm.weight.mul_(4.0)
    head.blank.bias.fill_(-0.5)
    return head


@examples(40)
@given(
    kind=st.sampled_from(KINDS_WITH_CONTEXT),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3),
    size=st.integers(2, 40),
    beam=st.sampled_from([1, 3, 10, 50]),
    least=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
)
@torch.no_grad()
def test_the_same_trees(
    tiny_base: BaseModel, kind: str, seed: int, rows: int, size: int, beam: int, least: float
) -> None:
    """What is less probable than `least` may be left out: each frame after a band's first loses at most so much."""
    head = sharp_head(tiny_base, kind, seed)
    config = head.config
    states = torch.randn(rows, config.num_frames, tiny_base.hidden_size)
    recent = torch.randint(tiny_base.vocab_size, (rows, head.recent_tokens))
    found = NativeSearch(head, tiny_base, beam)(states, recent, size, least)
    check_slice_contract(found)
    assert found.tokens[:, 0].tolist() == recent[:, -1].tolist()

    def whole(size: int, beam: int) -> TokenTree:
        model = FrameLattice(head, tiny_base, states, recent)
        return best_lattice_trie(model, recent[:, -1], config.num_frames, config.band, config.depth, size, beam)

    if not least:
        check_same_trees(found, whole(size, beam), DEPTH)
        return
    exact = whole(400, 200)
    for row in range(rows):
        known = nodes(exact, row, DEPTH)
        for prefix, prob in nodes(found, row, DEPTH).items():
            if prefix in known:
                assert known[prefix] - DEPTH * (config.band - 1) * least - 1e-5 <= prob <= known[prefix] + 1e-5


@examples(40)
@given(
    kind=st.sampled_from(KINDS_WITHOUT),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3),
    size=st.integers(2, 120),
    beam=st.sampled_from([1, 3, None, None]),
    blank=st.sampled_from([-8.0, -0.5, 3.0]),
    sharp=st.sampled_from([0.1, 4.0, 12.0]),
)
@torch.no_grad()
def test_the_same_tries_of_prefixes(
    tiny_base: BaseModel, kind: str, seed: int, rows: int, size: int, beam: int | None, blank: float, sharp: float
) -> None:
    head = sharp_head(tiny_base, kind, seed)
    head.norm.weight.mul_(sharp / 4)
    head.blank.bias.fill_(blank)
    config = head.config
    states = torch.randn(rows, config.num_frames, tiny_base.hidden_size)
    pending = torch.randint(tiny_base.vocab_size, (rows, 1))
    found = NativeSearch(head, tiny_base, beam)(states, pending, size, 0.0)
    check_slice_contract(found)
    log_probs = head.log_probs(states, head.output(tiny_base).lm_head)
    check_same_trees(found, best_trie(log_probs, pending[:, 0], config.depth, size, beam=beam), DEPTH)


@pytest.mark.parametrize("kind", ["context 1", "ctc"])
@torch.no_grad()
def test_what_is_less_probable_than_asked_for_is_not_extended(tiny_base: BaseModel, kind: str) -> None:
    head = sharp_head(tiny_base, kind, 0)
    states, recent = torch.randn(4, head.config.num_frames, tiny_base.hidden_size), torch.tensor([[3], [4], [5], [6]])
    tree = NativeSearch(head, tiny_base, 10)(states, recent, 60, 0.05)
    exists = tree.tokens >= 0
    parents = tree.log_probs.gather(1, tree.parents).exp()
    assert bool((parents[exists] > 0.05).all())
    assert int(exists.sum()) < exists.numel()


@pytest.mark.parametrize("kind", ["context 2", "ctc"])
@torch.no_grad()
def test_the_same_trees_whatever_else_is_searched(tiny_base: BaseModel, kind: str) -> None:
    head = sharp_head(tiny_base, kind, 1)
    search = NativeSearch(head, tiny_base, 10)
    states = torch.randn(7, head.config.num_frames, tiny_base.hidden_size)
    recent = torch.randint(tiny_base.vocab_size, (7, head.recent_tokens))
    together = search(states, recent, 12, 0.05)
    for row in range(7):
        alone = search(states[row : row + 1], recent[row : row + 1], 12, 0.05)
        for name, value in vars(alone).items():
            assert torch.equal(value[0], getattr(together, name)[row]), name


@pytest.mark.parametrize("kind", ["context 2", "ctc"])
@torch.no_grad()
def test_a_row_that_is_not_finite_drafts_nothing_and_harms_no_other(tiny_base: BaseModel, kind: str) -> None:
    head = sharp_head(tiny_base, kind, 2)
    search = NativeSearch(head, tiny_base, 10)
    states = torch.randn(3, head.config.num_frames, tiny_base.hidden_size)
    recent = torch.randint(tiny_base.vocab_size, (3, head.recent_tokens))
    expected = search(states, recent, 12, 0.0)
    states[1] = torch.nan
    found = search(states, recent, 12, 0.0)
    assert found.tokens[1].tolist() == [recent[1, -1].item(), *[-1] * 11]
    for name, value in vars(found).items():
        assert torch.equal(value[[0, 2]], getattr(expected, name)[[0, 2]]), name


def test_a_table_that_is_too_large_is_not_made(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("drafter.ctc.head.MOST_ENTRIES", 97 * 24 - 1)
    head = make_head(tiny_base, "context 1")
    assert isinstance(head, CTCHead)
    with caplog.at_level(logging.WARNING):
        search = head.prepared_search(tiny_base, "exact")
    assert "table of label terms would have 2328 numbers" in caplog.text
    states, recent = torch.randn(1, head.config.num_frames, tiny_base.hidden_size), torch.tensor([[3]])
    check_same_trees(search(states, recent, 9, 0.0), head.search(states, recent, tiny_base, 9, "exact"), DEPTH)


@torch.no_grad()
def test_walks_search_natively_and_in_silence_by_pytorch_where_that_cannot_be(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = sharp_head(tiny_base, "context 2, in part", 1)
    asked: list[TokenTree] = []
    native = NativeSearch.__call__

    def called(self: NativeSearch, *given: Any) -> TokenTree:
        asked.append(native(self, *given))
        return asked[-1]

    monkeypatch.setattr(NativeSearch, "__call__", called)

    def walked() -> TokenTree:
        hidden = torch.ones(1, 9, tiny_base.hidden_size)
        return head.trees_at(tiny_base, torch.arange(9)[None], hidden, torch.tensor([[3, 7]]), 9)

    found = walked()
    assert len(asked) == 1
    monkeypatch.setattr("drafter.ctc.head.MOST_ENTRIES", 1)
    check_same_trees(walked(), found, DEPTH)
    assert len(asked) == 1
    assert not caplog.records

"""`cacheback` grows trees from its tables, keeps texts apart where they must be, and changes no token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.drafters.contract import Ask, Committed, DraftContext, Loan
from drafter.methods.cacheback import drafter as cacheback
from drafter.methods.cacheback.drafter import CachebackDrafter, LruTable, grow
from drafter.methods.cacheback.frozen_table import Table
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_rows
from recipes.cacheback.counting import NgramCounts
from tests.support.models import run_engine
from tests.support.slots import enter, move
from tests.support.trees import check_slice_contract


def table_of(*texts: list[int]) -> LruTable:
    table = LruTable(leaders=50, followers=4, follower_length=2)
    for text in texts:
        table.learn(text)
    return table


def tree_of(tables: Sequence[Table], tail: list[int], nodes: int, depth: int) -> TokenTree:
    return from_rows(torch.tensor(tail[-1:]), [grow(tables, tail, nodes, depth)], nodes + 1)


def proposed(drafter: CachebackDrafter, text: list[int], nodes: int) -> TokenTree:
    """The tree of the text in the first slot."""
    length = len(text) - 1
    context = DraftContext(torch.tensor([text]), None, torch.tensor([length]), [length])
    drafter.prepare(context)
    return drafter.propose(context, Ask(nodes))


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    paths = tree.paths(tree.size)[0, 1:].tolist()
    return {tuple(token for token in path if token >= 0) for path in paths} - {()}


def test_the_search_goes_on_from_the_end_of_each_follower() -> None:
    tree = tree_of([table_of([1, 2, 3, 4, 5])], [1], nodes=8, depth=4)
    assert paths_of(tree) == {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)}


def test_a_text_s_own_table_is_asked_first() -> None:
    tree = tree_of([table_of([1, 2, 3]), table_of([1, 7, 8])], [1], nodes=1, depth=4)
    assert paths_of(tree) == {(2,)}
    both = tree_of([table_of([1, 2, 3]), table_of([1, 7, 8])], [1], nodes=4, depth=4)
    assert paths_of(both) == {(2,), (2, 3), (7,), (7, 8)}


def test_longer_leaders_come_first() -> None:
    tables = [LruTable(50, 4, 4, 1), LruTable(50, 4, 2, 1), LruTable(50, 4, 1, 3)]
    for text in ([9, 8, 7, 1, 2, 3, 4], [0, 0, 7, 1, 5, 5, 5], [9, 8, 0, 1, 6, 6, 6]):
        for table in tables:
            table.learn(text)
    assert paths_of(tree_of(tables, [3, 3, 3, 1], nodes=1, depth=4)) == {(6,)}  # the newest
    assert paths_of(tree_of(tables, [3, 3, 7, 1], nodes=1, depth=4)) == {(5,)}  # the newest after 7, 1
    assert paths_of(tree_of(tables, [9, 8, 7, 1], nodes=1, depth=4)) == {(2,)}  # the only one after 9, 8, 7, 1
    assert paths_of(tree_of(tables, [9, 8, 7, 1], nodes=3, depth=4)) == {(2,), (2, 3), (2, 3, 4)}


def test_the_most_probable_of_followers_that_begin_alike_counts() -> None:
    long, short = LruTable(50, 4, 2, 1), LruTable(50, 4, 1, 3)
    long.learn([7, 1, 2, 3, 4])
    short.learn([1, 2, 3, 4])
    short.learn([1, 6, 6, 6])
    found = grow([long, short], [7, 1], nodes=4, depth=3)
    probabilities = {
        token: round(math.exp(log_prob), 4) for token, log_prob in zip(found.tokens, found.log_probs, strict=True)
    }
    # After 7, 1 comes 2, after 1, 2 comes 3, and so on: 0.5 each. By the other table 2 alone would have 0.3 · 0.6.
    assert {token: probabilities[token] for token in (2, 3, 4)} == {2: 0.5, 3: 0.25, 4: 0.125}


def test_a_passage_is_copied_though_its_tokens_stand_elsewhere_too() -> None:
    """In newer text each token of the passage is followed by others, more than a leader keeps."""
    passage = list(range(100, 120))
    elsewhere = [token for other in range(12) for one in passage for token in (one, 200 + other)]
    drafter = CachebackDrafter(8, isolated=True)
    drafter.open(Loan(Mock(), 1, 1000, StageTimes()))
    text = [*passage, *elsewhere, *passage[:4]]
    enter(drafter, 0, text)
    tree = proposed(drafter, text, 8)
    assert tuple(passage[4:12]) in paths_of(tree)


def test_a_loop_is_followed_as_soon_as_its_first_token_has_come_again() -> None:
    drafter = CachebackDrafter(4, isolated=True)
    drafter.open(Loan(Mock(), 1, 100, StageTimes()))
    enter(drafter, 0, [5, 6])
    drafter.observe(Committed([0], [[7]]))
    drafter.observe(Committed([0], [[5]]))
    assert (6, 7, 5, 6) in paths_of(proposed(drafter, [5, 6, 7, 5], 4))


def test_what_has_ended_while_others_drafted_is_learned_but_for_the_oldest() -> None:
    drafter = CachebackDrafter(4)
    drafter.open(Loan(Mock(), 2, 100, StageTimes()))
    old, new = [1, 2, 3, 4], [11, 12, 13, 14]
    enter(drafter, 0, old)
    for _ in range(cacheback._UNREAD // 1000 + 1):
        enter(drafter, 0, [0] * 1000)
    enter(drafter, 0, new[:2])
    drafter.observe(Committed([0], [new[2:]]))
    enter(drafter, 1, [9])
    move(drafter, 1, 0)
    drafter.observe(Committed([0], [[11]]))
    assert (12, 13, 14) in paths_of(proposed(drafter, [9, 11], 4))
    drafter.observe(Committed([0], [[1]]))
    assert not paths_of(proposed(drafter, [9, 11, 1], 4))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6))
def test_what_is_learned_does_not_depend_on_the_steps_in_which_it_came(steps: list[list[int]]) -> None:
    text = [token for step in steps for token in step]
    trees = []
    for pieces in ([text], steps):
        drafter = CachebackDrafter(8)
        drafter.open(Loan(Mock(), 1, 100, StageTimes()))
        enter(drafter, 0, pieces[0])
        for piece in pieces[1:]:
            drafter.observe(Committed([0], [piece]))
        trees.append(proposed(drafter, text, 8))
    for whole, piecewise in zip(vars(trees[0]).values(), vars(trees[1]).values(), strict=True):
        assert torch.equal(whole, piecewise)


def test_a_frozen_table_is_asked_after_the_dynamic_ones() -> None:
    counts = NgramCounts(100, 3)
    counts.add([1, 9, 9, 1, 2, 3, 4, 6, 6])
    frozen = counts.table(leaders=10, followers=4)
    own, shared = table_of([1, 2, 3]), table_of([1, 7, 8])
    assert paths_of(tree_of([own, shared, frozen], [1], nodes=2, depth=2)) == {(2,), (7,)}
    every = tree_of([own, shared, frozen], [1], nodes=6, depth=2)
    assert paths_of(every) == {(2,), (2, 3), (7,), (7, 8), (9,), (9, 9)}
    assert paths_of(tree_of([own, shared, frozen], [4], nodes=2, depth=2)) == {(6,), (6, 6)}


def test_nothing_is_known() -> None:
    assert paths_of(tree_of([table_of([1, 2, 3])], [9], nodes=4, depth=4)) == set()
    assert paths_of(tree_of([table_of()], [9], nodes=4, depth=4)) == set()


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(1, 6),
)
def test_trees_keep_the_contract(texts: list[list[int]], nodes: int, depth: int) -> None:
    tree = tree_of([table_of(*texts), table_of(texts[0])], texts[0], nodes, depth)
    check_slice_contract(tree)
    paths = paths_of(tree)
    assert all(len(path) <= depth for path in paths)
    assert len(paths) == int((tree.tokens[:, 1:] >= 0).sum())  # no path twice


def requests(count: int, temperature: float) -> list[Request]:
    return [
        Request(
            [5 + row % 4, 6, 7, 8, 9, 10 + row % 4] * 3,
            SamplingParams(12 + row % 5, temperature=temperature, seed=row % 2, ignore_eos=True),
        )
        for row in range(count)
    ]


def test_isolated_rows_are_drafted_as_if_they_were_alone(tiny_base: BaseModel) -> None:
    first, second = requests(2, 0.0)
    alone = run_engine(tiny_base, CachebackDrafter(7, isolated=True), [second], max_num_seqs=1, num_draft_tokens=7)[
        0
    ].counts
    after = run_engine(
        tiny_base, CachebackDrafter(7, isolated=True), [first, first, second], max_num_seqs=1, num_draft_tokens=7
    )[2].counts
    assert alone == after
    shared = run_engine(tiny_base, CachebackDrafter(7), [second, second], max_num_seqs=1, num_draft_tokens=7)
    assert shared[1].counts.num_decode_steps < shared[0].counts.num_decode_steps

from __future__ import annotations

import numpy as np
import pytest

from drafter.budget.contract import ScoredTrees
from drafter.budget.worth import Worth
from drafter.drafters.contract import MeasuredWorth

NODES = np.array([0, 3, 7])


def scored(*accepted: list[int], drafted: int | None = None) -> ScoredTrees:
    mask = np.array(accepted, dtype=bool)
    return ScoredTrees(0, np.full(len(mask), mask.shape[1] if drafted is None else drafted), mask)


def test_a_tree_tells_what_smaller_trees_would_have_brought() -> None:
    worth = Worth(NODES)
    for _ in range(500):
        worth.learn(scored([1, 0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]))
    assert worth.gain == pytest.approx([0.0, 1.5, 2.5])
    assert worth.drafted == pytest.approx([0.0, 3.0, 7.0])


def test_larger_trees_keep_the_proportion_that_is_known_of_them() -> None:
    worth = Worth(NODES)
    for _ in range(500):
        worth.learn(scored([1, 0, 0, 1, 1, 1, 0]))
    for _ in range(500):
        worth.learn(scored([1, 1, 0]))
    assert worth.gain == pytest.approx([0.0, 2.0, 8.0], rel=0.001)


def test_trees_may_have_fewer_draft_tokens_than_were_asked_for() -> None:
    worth = Worth(NODES)
    for _ in range(500):
        worth.learn(scored([1, 0, 0, 0, 0, 0, 0], drafted=2))
    assert worth.drafted == pytest.approx([0.0, 2.0, 2.0], rel=0.001)


def test_many_trees_at_once_count_as_one_after_another() -> None:
    at_once, in_turn = Worth(NODES), Worth(NODES)
    for worth in (at_once, in_turn):
        worth.learn(scored(*[[1, 0, 0]] * 400))
    at_once.learn(scored(*[[0, 0, 0]] * 5))
    for _ in range(5):
        in_turn.learn(scored([0, 0, 0]))
    assert at_once.gain == pytest.approx(in_turn.gain)


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_a_change_of_the_text_is_noticed(before: int, after: int) -> None:
    worth = Worth(NODES)
    for _ in range(500):
        worth.learn(scored([before] * 7))
    for _ in range(30):
        worth.learn(scored([after] * 7))
    assert worth.gain[2] == pytest.approx(7 * after, abs=1.5)


def test_what_trees_may_bring_is_known_better_with_each_tree_and_less_with_time() -> None:
    worth, may_bring = Worth(NODES), []
    for _ in range(5):
        for _ in range(10):
            worth.learn(scored([1, 0, 0, 0, 0, 0, 0]))
        may_bring.append(float(worth.may_bring(0)[2]))
    assert may_bring == sorted(may_bring, reverse=True)
    ago = [float(worth.may_bring(steps)[2]) for steps in (0, 50, 100, 10_000)]
    assert 1.0 < ago[0] < ago[1] < ago[2] < ago[3] == 7.0


def test_few_trees_with_nothing_accepted_do_not_mean_that_nothing_ever_is() -> None:
    worth = Worth(NODES)
    worth.gain[:] = 0.0
    assert worth.may_bring(0)[2] > 1.0


def test_what_was_measured_is_evidence_until_it_is_forgotten() -> None:
    worth = Worth(NODES)
    guess = worth.gain.copy()
    worth.believe(MeasuredWorth((3, 15), (1.0, 4.0)))  # log2(1 + nodes) is 2, 3 and 4 at 3, 7 and 15 nodes
    assert worth.is_known
    assert worth.gain == pytest.approx([0.0, 1.0, 2.5])
    worth.forget()
    assert (worth.is_known, worth.gain.tolist()) == (False, guess.tolist())

"""The node budget: what is drafted and verified where trees cost what a table says."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.budget.adaptive import LEAST_AT_FIRST, AdaptiveBudget, Calibration, Cut, FixedBudget
from drafter.budget.cost_model import LatencyTable, batch_sizes

TABLE = LatencyTable(
    batches=np.array([1.0, 8.0]),
    nodes=(0, 4, 8),
    verify=np.array([[1.0, 1.2, 1.5], [2.0, 5.0, 12.0]]),
    draft=np.array([[0.0, 0.2, 0.2], [0.0, 0.5, 0.5]]),
)
LIKELY = np.log(np.full((1, 8), 0.5))


def test_latencies_are_interpolated_between_batches() -> None:
    verify, draft = TABLE.at(1)
    assert verify.tolist() == [1.0, 1.2, 1.5]
    assert TABLE.at(8)[1].tolist() == [0.0, 0.5, 0.5]
    assert 1.2 < TABLE.at(4)[0][1] < 5.0
    assert draft.tolist() == [0.0, 0.2, 0.2]


def test_the_budget_takes_the_best_ratio_of_tokens_to_time() -> None:
    budget = AdaptiveBudget(TABLE)
    # 1 + 8 × 0.5 tokens in 1.5 and 0.2 for drafting, against 1 + 4 × 0.5 in 1.2 and 0.2, against 1 in 1.0 and 0.2.
    assert budget.sizes(LIKELY).tolist() == [8]
    assert budget.sizes(np.log(np.full((1, 8), 0.01))).tolist() == [0]


def test_nodes_go_to_the_rows_where_they_are_worth_most() -> None:
    prices = np.log(np.full((8, 8), 0.05))
    prices[2] = np.log(0.9)  # eight nodes of this row
    prices[5, :3] = np.log(0.8)
    prices[6, 1:] = -np.inf  # padding
    assert AdaptiveBudget(TABLE).sizes(prices).tolist() == [0, 0, 4, 0, 0, 3, 0, 0]
    # 8 + 9.6 + 0.05 × 5 tokens in 5 against 8 in 2; what one row has, all have to pay for.
    assert AdaptiveBudget(TABLE, "alike").sizes(prices).tolist() == [0] * 8
    assert AdaptiveBudget(TABLE, "alike").sizes(np.log(np.full((8, 8), 0.5))).tolist() == [4] * 8
    assert AdaptiveBudget(TABLE, "never").sizes(prices).tolist() == [8] * 8


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from(get_args(Cut)), st.integers(0, 2**32 - 1))
def test_no_allocation_of_as_many_nodes_promises_more(rows: int, drafted: int, cut: Cut, seed: int) -> None:
    random = np.random.default_rng(seed)
    prices = -np.sort(random.exponential(2.0, (rows, drafted)), axis=1)
    prices[np.arange(drafted) >= random.integers(drafted + 1, size=(rows, 1))] = -np.inf
    budget = AdaptiveBudget(TABLE, cut)
    sizes = budget.sizes(prices)
    assert 0 < budget.least < 1
    assert sizes.shape == (rows,)
    assert sizes.min() >= 0
    assert sizes.max() <= drafted
    taken = np.arange(drafted) < sizes[:, None]
    if cut == "each" and 0 < taken.sum() < taken.size:
        narrow = np.arange(drafted) < sizes.max()
        assert prices[taken].min() >= prices[~taken & narrow].max(initial=-np.inf)
    if cut != "each":
        assert len(set(sizes.tolist())) == 1


def decisions(budget: AdaptiveBudget, price: float, accepted: float, steps: int) -> list[int]:
    """Nodes drafted in each of `steps` steps of eight rows, where nodes of `price` come true this often."""
    made = []
    for _ in range(steps):
        made.append(budget.draft(8))
        if made[-1]:
            prices = np.log(np.full((8, made[-1]), price))
            budget.sizes(prices)
            budget.observe(prices, np.arange(prices.size).reshape(prices.shape) < accepted * prices.size)
    return made


def test_speculation_switches_off_where_it_does_not_pay_and_looks_again_ever_less_often() -> None:
    """2.52 tokens in 5.5 against 1 in 2: near enough for 3 steps on trial after each look."""
    made = decisions(AdaptiveBudget(TABLE), price=0.38, accepted=0.38, steps=2200)
    assert made[:8] == [8, 8, 8, 8, 8, 4, 4, 4]  # 16 rows to look at, and a trial of either size
    drafts = [step for step, nodes in enumerate(made) if nodes]
    looks = [step for step in drafts if step - 1 not in drafts]
    assert looks == [0, 71, 202, 461, 976, 1491, 2006]  # 63, 127, 255, 511, 511, 511 plain steps
    assert all(made[look : look + 4] == [8, 4, 4, 4] for look in looks[1:])


def test_what_is_hopeless_is_looked_at_but_not_tried() -> None:
    made = decisions(AdaptiveBudget(TABLE), price=0.05, accepted=0.05, steps=500)
    assert [step for step, nodes in enumerate(made) if nodes] == [0, 1, 65, 321]  # 63, 255, 511 plain steps


def test_a_look_is_no_dearer_than_four_plain_steps() -> None:
    assert AdaptiveBudget(TABLE, "never").draft(8) == 4  # 5.5 against 2; 8 nodes take 12.5
    assert AdaptiveBudget(TABLE).draft(8) == 8  # to draft them takes 0.5, and half of them need not be verified
    assert AdaptiveBudget(TABLE).draft(1) == 8  # 1.7 against 1
    dear = LatencyTable(TABLE.batches, TABLE.nodes, TABLE.verify, 100 * TABLE.draft)
    assert AdaptiveBudget(dear).draft(8) == 4  # there must be something to look at


def test_no_more_is_drafted_than_pays() -> None:
    """3.4 and 5.8 tokens a row in 5.5 and 12.5: the small tree, with a look at the next larger one now and then."""
    made = decisions(AdaptiveBudget(TABLE), price=0.6, accepted=0.6, steps=102)
    assert set(made) == {4, 8}
    assert [step for step, nodes in enumerate(made) if nodes == 8] == [0, 1, 2, 3, 4, 23, 55, 87]


def test_larger_trees_than_could_be_looked_at_are_tried_where_the_largest_nearly_pay() -> None:
    """A look at eight nodes would take longer than four plain steps; four nodes bring 3.4 in 3.4 against 1 in 1."""
    dear = LatencyTable(
        batches=np.array([1.0]),
        nodes=(0, 4, 8),
        verify=np.array([[1.0, 1.9, 2.2]]),
        draft=np.array([[0.0, 1.5, 2.3]]),
    )
    made = []
    budget = AdaptiveBudget(dear)
    for _ in range(60):
        made.append(budget.draft(1))
        if made[-1]:
            prices = np.log(np.full((1, made[-1]), 0.6))
            budget.sizes(prices)
            budget.observe(prices, np.arange(made[-1])[None] < 0.6 * made[-1])
    assert made[:19] == [4] * 19  # 16 looks and three on trial
    assert made[19:22] == [8] * 3  # 5.8 in 4.5
    assert 0 not in made


def test_a_search_that_turns_out_dear_is_used_less() -> None:
    budget = AdaptiveBudget(TABLE)
    assert all(decisions(budget, price=0.6, accepted=0.6, steps=20))
    for _ in range(100):  # drafting takes ten times as long as in the table, on a machine that is half as fast
        budget.clock(8, 4, np.full(8, 4), (2 * 10 * 0.5, 2 * 5.0))
    assert decisions(budget, price=0.6, accepted=0.6, steps=20) == [0] * 20


def test_the_cost_of_the_largest_trees_is_learnt_like_any_other() -> None:
    budget = AdaptiveBudget(TABLE)
    for _ in range(16 + 2 * 3 + 1):  # burn-in, trials, and one that was decided
        prices = np.log(np.full((1, budget.draft(1)), 0.9))
        budget.sizes(prices)
        budget.observe(prices, np.ones(prices.shape, dtype=bool))
    assert budget.draft(1) == 8  # up to 9 tokens in 1.7 against 1 in 1
    for _ in range(100):
        budget.clock(1, 0, np.full(1, 0), (0.0, 1.0))
        budget.clock(1, 8, np.full(1, 8), (20.0, 15.0))
    assert budget.draft(1) == 0  # in 35 against 1 in 1


def test_what_one_row_costs_says_nothing_of_many() -> None:
    """A search that is dear for one row may be as cheap as the table says for eight; six are counted as eight."""
    budget = AdaptiveBudget(TABLE)
    assert all(decisions(budget, price=0.6, accepted=0.6, steps=20))
    for _ in range(100):
        budget.clock(1, 4, np.full(1, 4), (100.0, 1.2))
        budget.clock(2, 8, np.full(2, 8), (100.0, 1.5))
    assert all(decisions(budget, price=0.6, accepted=0.6, steps=20))
    for _ in range(100):
        budget.clock(6, 4, np.full(6, 4), (100.0, 5.0))
    assert not any(decisions(budget, price=0.6, accepted=0.6, steps=20))


def test_many_rows_pause_while_one_drafts() -> None:
    """Eight times 1.8 tokens in 5.5 against 1 in 2, and up to 2.6 in 1.7 against 1 in 1."""
    budget = AdaptiveBudget(TABLE)
    assert not any(decisions(budget, price=0.2, accepted=0.2, steps=20)[8:])
    assert all(budget.draft(1) for _ in range(20))
    assert not any(budget.draft(8) for _ in range(20))


def test_what_many_rows_say_is_believed_sooner() -> None:
    """Texts that have become unlikely: how long drafting goes on, where it is as cheap for eight rows as for one."""
    cheap = replace(TABLE, verify=TABLE.verify[[0, 0]], draft=TABLE.draft[[0, 0]])
    steps: dict[int, int] = {}
    for rows in (1, 8):
        budget = AdaptiveBudget(cheap)
        for price in (0.9,) * 40 + (0.01,) * 40:
            nodes = budget.draft(rows)
            if nodes:
                budget.sizes(np.log(np.full((rows, nodes), price)))
                steps[rows] = steps.get(rows, 0) + (price < 0.9)
    assert steps[8] < 10 < steps[1]


def test_trees_pay_more_where_plain_steps_have_become_slow() -> None:
    """Handing out tokens, say, costs as much with every step, however many they are."""
    budget = AdaptiveBudget(TABLE)
    assert not any(decisions(budget, price=0.2, accepted=0.2, steps=20)[8:])  # 1.8 tokens in 5.5 against 1 in 2
    for _ in range(100):
        budget.clock(8, 0, np.full(8, 0), (0.0, 2.0 + 6.0))
    for _ in range(100):
        budget.clock(8, 4, np.full(8, 4), (0.5, 5.0 + 6.0))
    # A pause is interrupted before long; then plain steps are compared with once, as now their time is known.
    made = decisions(budget, price=0.2, accepted=0.2, steps=60)
    assert made[:33].count(4) == 1
    assert all(made[33:])


def test_plain_steps_count_only_where_many_come_one_after_another() -> None:
    """The first ones after drafting find little of the base in the processor's caches."""
    budget = AdaptiveBudget(TABLE)
    assert not any(decisions(budget, price=0.2, accepted=0.2, steps=20)[8:])  # 1.8 tokens in 5.5 against 1 in 2
    for _ in range(60):
        budget.clock(8, 4, np.full(8, 4), (0.5, 5.0))
        budget.clock(8, 0, np.full(8, 0), (0.0, 50.0))
    assert not any(decisions(budget, price=0.2, accepted=0.2, steps=11))
    for _ in range(60):
        budget.clock(8, 0, np.full(8, 0), (0.0, 50.0))
    assert decisions(budget, price=0.2, accepted=0.2, steps=40)[-1]


def test_other_sizes_are_tried_and_what_they_cost_is_learnt_apart() -> None:
    budget = AdaptiveBudget(TABLE)
    made = []
    for _ in range(200):
        nodes = budget.draft(1)
        made.append(nodes)
        if nodes:
            prices = np.log(np.full((1, nodes), 0.5))
            budget.sizes(prices)
            budget.observe(prices, np.arange(nodes)[None] < 0.5 * nodes)
        # Eight nodes take fifteen times as long to draft as the table says, four as long as that.
        budget.clock(1, nodes, np.full(1, nodes), ({0: 0.0, 4: 0.2, 8: 3.0}[nodes], {0: 1.0, 4: 1.2, 8: 1.5}[nodes]))
    assert {0, 4, 8} <= set(made[:50])
    assert set(made[100:]) <= {4, 8}
    assert made[100:].count(8) < 10


def test_a_modest_drafter_is_found_out() -> None:
    """Its prices say that drafting does not pay; what is accepted says that it does."""
    budget = AdaptiveBudget(TABLE)
    assert all(decisions(budget, price=0.3, accepted=0.6, steps=300)[-200:])


def test_speculation_comes_back_when_the_text_allows() -> None:
    budget = AdaptiveBudget(TABLE)
    assert not any(decisions(budget, price=0.3, accepted=0.1, steps=400)[-30:])
    assert all(decisions(budget, price=0.3, accepted=0.8, steps=4000)[-200:])


def test_what_is_hardly_verified_is_hardly_looked_for() -> None:
    budget = AdaptiveBudget(TABLE)
    assert budget.least == pytest.approx(LEAST_AT_FIRST)
    prices = np.log(np.tile([0.9, 0.6, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01], (8, 1)))
    for _ in range(100):
        assert budget.sizes(prices).tolist() == [2] * 8
    assert budget.least == pytest.approx(0.45, rel=0.01)
    for _ in range(100):
        budget.sizes(prices - 9)  # nothing of this is verified
    assert budget.least == pytest.approx(0.45, rel=0.01)


def test_calibration_follows_what_is_accepted() -> None:
    calibration = Calibration()
    prices = np.log(np.full((1, 8), 0.5))
    assert calibration.probability(prices) == pytest.approx(0.5)
    for _ in range(100):
        calibration.observe(prices, np.array([[True] * 2 + [False] * 6]))
    assert calibration.probability(prices) == pytest.approx(0.25, abs=0.02)
    assert calibration.probability(np.array([-np.inf])).tolist() == [0.0]


def test_a_fixed_budget_is_fixed() -> None:
    assert FixedBudget(4).sizes(LIKELY).tolist() == [4]
    assert FixedBudget(4).draft(1) == 4


def test_batch_sizes_are_powers_of_four_and_the_slots() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 4, 16, 20]

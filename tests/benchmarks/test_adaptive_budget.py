"""The budget in a world whose costs and acceptance are known: what it chooses, and what finding out costs.

The clock is virtual: a step takes what the world's table says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.budget_constants import TABLE, World, table_of
from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import ScoredTrees, StepObservation, StepSeconds
from drafter.drafters.contract import Ask, MeasuredWorth
from drafter.statistics import PLAIN
from tests.support.marks import slow_but_tuples

# ---- one drafter


CASES = list(product([1, 3, 8], [0.02, 0.3, 0.5, 0.7, 0.9], [True, False]))


@pytest.mark.parametrize(("rows", "right", "shadows"), slow_but_tuples(CASES[::7], CASES))
def test_it_is_about_as_fast_as_the_best_fixed_number_of_draft_tokens(rows: int, right: float, shadows: bool) -> None:
    world = World([right])
    rate = world.run(world.budget(shadows=shadows), rows, 1500)
    assert rate > 0.93 * world.best(rows)
    assert rate > 0.98


def test_where_drafting_pays_again_it_drafts_again() -> None:
    world = World([0.05])
    budget = world.budget()
    world.run(budget, 8, 1000)
    assert world.drafted(0) < 20
    world.right = [0.9]
    world.run(budget, 8, 1000)
    assert all(ask.nodes for ask in world.asked[-300:])


def test_a_drafter_that_often_has_nothing_to_say_pays_when_it_speaks() -> None:
    """A row without draft tokens costs hardly more than a plain one."""
    world = World([0.9], table=table_of([0.01]), silent=2 / 3)
    budget = world.budget()
    assert world.run(budget, 1, 1000) > 1.5
    assert world.run(budget, 8, 1000) > 1.0


def test_costs_that_differ_from_the_table_are_learnt() -> None:
    """Drafting takes thirty times as long as when it was measured."""
    world = World([0.6], real=table_of([3.0]))
    budget = world.budget()
    world.run(budget, 8, 300)
    assert world.asked[0].nodes > 0 or world.asked[0].shadow is not None
    assert world.run(budget, 8, 1000) > 0.98


def test_trees_pay_more_where_plain_steps_have_become_slow() -> None:
    """Handing out tokens, say, costs as much with every step, however many they are."""
    world = World([0.25])
    budget = world.budget()
    world.run(budget, 8, 600)
    assert world.drafted(0) < 30
    world.real = replace(TABLE, verify=TABLE.verify + 40)
    world.run(budget, 8, 1500)
    assert sum(ask.nodes > 0 for ask in world.asked[-100:]) > 90


def test_what_one_row_costs_says_nothing_of_many() -> None:
    dear_alone = replace(TABLE, draft=np.array([[[0.0, 100.0, 100.0, 100.0], [0.0, 0.1, 0.1, 0.1]]]))
    world = World([0.9], table=dear_alone)
    budget = world.budget()
    world.run(budget, 1, 500)
    assert world.drafted(0) == 0
    world.run(budget, 8, 200)
    assert world.drafted(0) > 150


def test_a_plain_step_that_seemed_slow_at_start_is_tried_though_drafting_seems_to_pay() -> None:
    """Something else slowed the machine while plain steps were measured, and only then."""
    world = World([0.3], table=replace(TABLE, verify=TABLE.verify + np.array([[0.0] * 4, [2.5, 0.0, 0.0, 0.0]])))
    world.real = TABLE
    budget = world.budget()
    world.run(budget, 8, 60)
    assert world.drafted(0) > 50
    world.run(budget, 8, 1500)
    assert world.run(budget, 8, 1000) > 0.97


@pytest.mark.parametrize("rows", [1, 8])
def test_a_table_that_is_not_sure_is_corrected_in_a_few_steps(rows: int) -> None:
    """Trees are dearer than when it was made, and what was measured on other text promises a gain by it."""
    dear = replace(TABLE, verify=np.array([[1.0, 1.8, 2.6, 4.2], [2.0, 5.0, 9.0, 17.0]]))
    promise = MeasuredWorth((3, 7, 15), (0.9, 1.1, 1.2))
    rates = []
    for seed in range(4):
        world = World([0.4], replace(TABLE, sure=False), real=dear, seed=seed)
        rates.append(world.run(world.budget(known=[promise]), rows, 200))
        assert sum(ask.nodes > 0 for ask in world.asked[40:]) < 16
    assert np.mean(rates) > 0.965  # it loses seven plain steps


def test_where_a_table_is_not_sure_plain_steps_tell_soon_what_they_take() -> None:
    first = []
    for sure in (True, False):
        world = World([0.9], replace(TABLE, sure=sure))
        world.run(world.budget(), 1, 200)
        drafted = [place for place, ask in enumerate(world.asked) if ask.nodes]
        first.append(next(place for place in range(drafted[0], 200) if not world.asked[place].nodes) - drafted[0])
    assert (first[0] >= 64, first[1] <= 8) == (True, True)


def test_of_a_number_of_draft_tokens_that_was_never_tried_its_neighbours_tell() -> None:
    """All steps take three times as long as the table says; after a few plain ones the budget expects that of all."""
    world = World([0.0], real=replace(TABLE, verify=3 * TABLE.verify))
    budget = world.budget(known=[MeasuredWorth((3, 7), (0.0, 0.0))])
    for _ in range(40):
        world.step(budget, 1)
    assert not any(ask.nodes for ask in world.asked)
    band = budget.bands[0]
    assert band.slower[0] > 2
    assert band.slower == pytest.approx(band.slower[0])


def test_with_so_many_rows_that_no_tree_can_pay_none_is_tried() -> None:
    """At 8 rows a draft token costs nearly a plain step, and at one row little."""
    steep = np.array([[1.0, 1.1, 1.3, 1.7], [2.0, 7.0, 14.0, 30.0]])
    world = World([0.6, 0.6], replace(table_of([0.1, 0.1]), verify=steep))
    budget = world.budget()
    assert world.run(budget, 8, 300) == 1.0
    assert not any(ask.nodes or ask.shadow for ask in world.asked)
    assert world.run(budget, 1, 300) > 1.3


def test_a_promise_is_explored_before_it_is_believed() -> None:
    """It is worth a tenth of a plain step, by the table and by other text, and comes true or does not."""
    promise = MeasuredWorth((3, 7), (0.35, 0.4))
    for right, drafts in ((0.02, False), (0.6, True)):
        world = World([right])
        budget = world.budget(known=[promise])
        world.run(budget, 1, 300)
        assert budget.choices()[0].explored > 0
        assert all(ask.nodes > 0 for ask in world.asked[-30:]) == drafts


def test_plain_steps_that_tell_what_they_take_cost_little_where_drafting_pays() -> None:
    world = World([0.9])
    world.run(world.budget(), 1, 5000)
    assert 24 <= sum(not ask.nodes for ask in world.asked) <= 48


def test_of_a_step_without_a_time_what_was_learnt_tells() -> None:
    """All takes twice as long as the table says."""
    world = World([0.0], real=replace(TABLE, verify=2 * TABLE.verify))
    budget = world.budget()
    for _ in range(600):
        world.step(budget, 1)
    (choice,) = budget.choices()
    assert choice.sums.plain > 300
    observed = StepObservation(1, Ask(0), 1)
    before = choice.sums.seconds
    budget.observe(observed)
    assert budget.choices()[0].sums.seconds - before == pytest.approx(2.0, rel=0.02)
    # A step that forced tokens have made shorter is no plain one, though no tree was asked for.
    before_it = budget.choices()[0].sums
    budget.observe(replace(observed, tokens=3))
    now = budget.choices()[0].sums
    assert (now.plain - before_it.plain, now.spec_row_steps - before_it.spec_row_steps) == (0, 1)


@pytest.mark.parametrize("shadows", [True, False])
@given(rows=st.integers(1, 9))
def test_planning_changes_nothing(rows: int, shadows: bool) -> None:
    budget = World([0.5, 0.5], table=table_of([0.1, 0.2])).budget(shadows=shadows)
    asked = budget.plan(rows)
    assert budget.plan(rows) == asked
    drafted = asked.shadow or asked
    assert drafted.least_probability == 1 / (drafted.nodes + 1)


def test_one_step_that_was_held_up_changes_little() -> None:
    world = World([0.8])
    budget = world.budget()
    world.run(budget, 1, 100)
    ask = budget.plan(1)
    nothing = ScoredTrees(0, np.array([ask.nodes]), np.zeros((1, ask.nodes), bool))
    budget.observe(StepObservation(1, ask, 1, nothing, StepSeconds(100.0, 50.0, 50.0)))
    world.run(budget, 1, 50)
    assert all(ask.nodes for ask in world.asked)


# ---- several drafters


DRAFTERS = [
    ([0.8, 0.3, 0.2], [0.1, 0.01, 0.01]),  # the first is the best
    ([0.3, 0.2, 0.8], [0.3, 0.01, 0.01]),  # the last
    ([0.8, 0.7], [1.5, 0.01]),  # the more accurate one is too dear
    ([0.02, 0.02, 0.02], [0.1, 0.05, 0.05]),  # none pays
    ([0.6, 0.6, 0.6, 0.6], [0.05, 0.05, 0.05, 0.05]),
]
CHOICES = [(rows, *drafters, shadows) for drafters in DRAFTERS for rows in (1, 8, 3) for shadows in (True, False)]


@pytest.mark.parametrize(("rows", "right", "costs", "shadows"), slow_but_tuples(CHOICES[::7], CHOICES))
def test_it_settles_on_the_best_and_exploring_costs_little(
    rows: int, right: list[float], costs: list[float], shadows: bool
) -> None:
    world = World(right, table_of(costs))
    budget = world.budget(shadows=shadows)
    rate = world.run(budget, rows, 3000)
    assert rate > 0.93 * world.best(rows)
    assert rate > 0.98
    (choice,) = budget.choices()
    best = max(range(len(right)), key=lambda member: world.alone(rows, member))
    assert world.alone(rows, int(choice.chosen.split()[-1])) > 0.9 * world.alone(rows, best)


RUNS = list(product([1, 2, 4, 8], [100, 200, 400]))


@pytest.mark.parametrize(("rows", "steps"), slow_but_tuples(RUNS[::5], RUNS))
def test_a_short_run_is_not_spent_on_finding_out(rows: int, steps: int) -> None:
    costs = [0.2, 0.05, 0.05, 0.25]
    lost, kept = [], []
    for seed in range(8):
        useless = World([0.02] * 4, table_of(costs), seed=seed)
        lost.append(1 - useless.run(useless.budget(), rows, steps))
        good = World([0.6, 0.3, 0.2, 0.25], table_of(costs), seed=seed)
        kept.append(good.run(good.budget(), rows, steps) / good.best(rows))
    assert np.mean(lost) < 0.012 + 1.5 / steps
    assert np.mean(kept) > 0.85


def lying(world: World) -> None:
    world.right = [0.0, 0.0]


def slow(world: World) -> None:
    world.right, world.real = [0.6, 0.0], table_of([3.0, 3.0])


def good_at_last(world: World) -> None:
    world.right = [0.9, 0.0] if len(world.asked) > 1000 else [0.0, 0.0]


def bad_at_last(world: World) -> None:
    world.right = [0.0, 0.0] if len(world.asked) > 1000 else [0.9, 0.0]


CHANGES = list(product([1, 8], [lying, slow, good_at_last, bad_at_last]))


@pytest.mark.parametrize(("rows", "change"), slow_but_tuples([*CHANGES[:4:2], *CHANGES[5::2]], CHANGES))
def test_a_drafter_that_lies_is_slow_or_changes_costs_two_percent(rows: int, change: Callable[[World], None]) -> None:
    """A gain in one half does not pay for a loss in the other."""
    world = World([0.0, 0.0], table_of([0.1, 0.1]))
    promise = MeasuredWorth((3, 7, 15), (1.5, 2.5, 3.0)) if change is lying else None
    budget = world.budget(known=(promise, None))
    lost, total, gained = 0.0, 0.0, False
    for _ in range(2):
        tokens = seconds = 0.0
        for _ in range(1000):
            change(world)
            made, taken = world.step(budget, rows)
            tokens, seconds = tokens + made, seconds + taken
        plain = tokens * world.plain_seconds(rows)
        lost, total, gained = lost + max(seconds - plain, 0.0), total + seconds, gained or plain > 1.2 * seconds
    assert lost < 0.02 * total
    assert gained == (change in (good_at_last, bad_at_last))


def test_it_finds_another_when_the_text_changes() -> None:
    world = World([0.8, 0.1], table_of([0.05, 0.05]))
    budget = world.budget()
    world.run(budget, 1, 2000)
    assert budget.choices()[0].chosen == "member 0"
    world.right = [0.1, 0.8]
    world.run(budget, 1, 1000)
    assert budget.choices()[0].chosen == "member 1"


def test_each_batch_size_has_a_choice_of_its_own() -> None:
    """A dear draft pays where a step is dear."""
    dear, cheap = [0.0, 9.0, 9.0, 9.0], [0.0, 0.01, 0.01, 0.01]
    table = replace(TABLE, draft=np.array([[dear, cheap], [cheap, dear]]))
    world = World([0.85, 0.4], table)
    budget = world.budget()
    world.run(budget, 1, 1500)
    world.run(budget, 8, 1500)
    alone, many = budget.choices()
    assert (alone.rows, alone.chosen, many.rows, many.chosen) == (1, "member 1", 8, "member 0")


def test_what_is_known_of_one_batch_size_holds_at_another() -> None:
    """Acceptance follows from drafter and text, costs from the batch size: at 8 rows they are high."""
    world = World([0.02, 0.01, 0.02], table_of([0.01] * 3))
    budget = world.budget()
    world.run(budget, 1, 500)
    world.run(budget, 8, 200)
    assert sum(ask.nodes > 0 for ask in world.asked) == 0
    assert budget.choices()[1].rows == 8


def test_what_was_measured_before_decides_the_first_step() -> None:
    world = World([0.8, 0.8], table_of([0.1, 0.1]))
    worth = MeasuredWorth((3, 7), (1.9, 3.0))
    first = world.budget(known=(None, worth)).plan(8)
    assert (first.nodes > 0, first.member) == (True, 1)
    worthless = MeasuredWorth((3, 7), (0.1, 0.1))
    assert world.budget(known=(worthless, worthless)).plan(8).nodes == 0


@settings(max_examples=10, derandomize=True)  # chance may always be worse once
@given(
    right=st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4), seed=st.integers(0, 99), rows=st.sampled_from([1, 8])
)
def test_the_regret_is_bounded(right: list[float], seed: int, rows: int) -> None:
    world = World(right, table_of([0.02 * (member + 1) for member in range(len(right))]), seed=seed)
    assert world.run(world.budget(), rows, 1500) > 0.9 * world.best(rows)


def test_a_member_that_is_withheld_drafts_only_once_it_is_renewed() -> None:
    world = World([0.3, 0.2, 0.9], table_of([0.01] * 3))
    budget = AdaptiveBudget(world.table, ["a", "b", "learnt"], withheld=[2], shadows=True)
    world.run(budget, 8, 800)
    assert {one.member for ask in world.asked for one in (ask, ask.shadow) if one is not None} == {0, 1}
    assert {view.name for view in budget.choices()[0].members} == {"a", "b"}
    budget.renewed(2)
    assert {view.name for view in budget.choices()[0].members} == {"a", "b"}  # there is no evidence yet
    assert world.run(budget, 8, 800) > 0.9 * world.alone(8, 2)
    assert world.drafted(2) > 700
    assert {view.name for view in budget.choices()[0].members} == {"a", "b", "learnt"}


def test_a_member_that_was_worth_nothing_is_explored_soon_after_it_is_renewed() -> None:
    world = World([0.4, 0.02], table_of([0.01, 0.3]))
    budget = world.budget()
    world.run(budget, 4, 2000)
    world.right = [0.4, 0.95]
    budget.renewed(1)
    world.run(budget, 4, 60)
    assert world.drafted(1) > 30


# ---- what it says


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("right", [[0.8, 0.3], [0.02, 0.01]])
def test_the_estimated_speedup_is_the_real_one(rows: int, right: list[float]) -> None:
    world = World(right, table_of([0.05, 0.01]))
    budget = world.budget()
    speedup = world.run(budget, rows, 1000)
    (choice,) = budget.choices()
    assert choice.sums.speedup == pytest.approx(speedup)
    assert (choice.sums.steps, choice.sums.row_steps) == (1000, 1000 * rows)
    assert choice.sums.plain == sum(not ask.nodes for ask in world.asked)
    assert choice.verdict is not None
    assert choice.verdict.drafts == (sum(ask.nodes > 0 for ask in world.asked[-200:]) > 100)


def test_what_is_told_of_members_never_contradicts_the_choice() -> None:
    world = World([0.85, 0.8], table_of([0.01, 0.01]))
    budget = world.budget()
    for right in ([0.85, 0.8], [0.8, 0.85], [0.1, 0.1], [0.02, 0.9]):
        world.right = right
        for _ in range(30):
            world.run(budget, 1, 10)
            (choice,) = budget.choices()
            for view in choice.members:
                assert (view.beside is None) == (view.name == choice.chosen)
                assert view.relative <= 1.051
                assert choice.verdict is not None
                assert view.beside in (None, choice.chosen if choice.verdict.drafts else PLAIN)

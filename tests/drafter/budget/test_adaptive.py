"""The adaptive budget in a world whose costs and acceptance are known: what it chooses, and how fast that is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import Floats, StepLoad, StepObservation, StepSeconds
from drafter.budget.latency_table import LatencyTable

TABLE = LatencyTable(
    batches=np.array([1.0, 8.0]),
    nodes=(0, 4, 8),
    verify=np.array([[1.0, 1.2, 1.5], [2.0, 5.0, 12.0]]),
    draft=np.array([[0.0, 0.2, 0.2], [0.0, 0.5, 0.5]]),
)


@dataclass(frozen=True)
class World:
    """Chains of draft tokens, each of which is right with `right`, and said to be so with `said`.

    Args:
        rows: Of each step.
        right: Share of draft tokens that are right, if the one before is.
        said: What the drafter says that share is.
        table: What steps really take.
    """

    rows: int
    right: float
    said: float
    table: LatencyTable = TABLE

    def chain(self, share: float, nodes: int) -> Floats:
        """Log prefix probabilities `[rows, nodes]`."""
        log_probs: Floats = np.log(share) * np.tile(np.arange(1.0, nodes + 1), (self.rows, 1))
        return log_probs

    def step(self, budget: AdaptiveBudget, random: np.random.Generator) -> tuple[int, float, float]:
        """Decode a step: nodes drafted, tokens a row, seconds."""
        asked = budget.plan(StepLoad(self.rows)).nodes
        verify, draft = self.table.at(self.rows)
        promised = self.chain(self.said, asked)
        accepted = (random.random((self.rows, asked)) < self.right).cumprod(1).astype(bool)
        rest = float(np.interp(asked, self.table.nodes, verify))
        drafting = float(np.interp(asked, self.table.nodes, draft))
        budget.observe(
            StepObservation(StepLoad(self.rows), asked, promised, promised, accepted, StepSeconds(0.0, drafting, rest))
        )
        return asked, 1 + accepted.sum() / self.rows, drafting + rest

    def run(self, budget: AdaptiveBudget, steps: int, seed: int = 0) -> tuple[list[int], float]:
        """Nodes drafted in each of `steps` steps, and tokens per second and row."""
        random = np.random.default_rng(seed)
        asked, tokens, seconds = zip(*(self.step(budget, random) for _ in range(steps)), strict=True)
        return list(asked), sum(tokens) / sum(seconds)

    @property
    def plain_rate(self) -> float:
        """Tokens per second and row of plain decoding."""
        return 1 / float(self.table.at(self.rows)[0][0])

    def fixed_rate(self, nodes: int) -> float:
        """Those of a fixed number of nodes, all verified."""
        verify, draft = self.table.at(self.rows)
        gain = float((self.right ** np.arange(1.0, nodes + 1)).sum())
        return (1 + gain) / float(
            np.interp(nodes, self.table.nodes, verify) + np.interp(nodes, self.table.nodes, draft)
        )


@pytest.mark.parametrize("right", [0.02, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 8])
def test_it_is_about_as_fast_as_the_best_fixed_number_of_nodes(rows: int, right: float) -> None:
    """Whatever that is: none, few or many; what it costs to find out is a few percent."""
    world = World(rows, right, said=right)
    _, rate = world.run(AdaptiveBudget(TABLE), 1500)
    best = max(world.plain_rate, *(world.fixed_rate(nodes) for nodes in (4, 8)))
    assert rate > 0.94 * best


@pytest.mark.parametrize("right", [0.01, 0.1, 0.2])
def test_speculation_is_hardly_slower_than_plain_decoding_where_it_cannot_pay(right: float) -> None:
    for rows in (1, 8):
        dear = World(rows, right, said=0.6, table=replace(TABLE, draft=6 * TABLE.draft))
        _, rate = dear.run(AdaptiveBudget(dear.table), 1500)
        assert rate > 0.97 * dear.plain_rate


@pytest.mark.parametrize(("rows", "most"), [(1, 9), (8, 4)])
def test_the_more_rows_the_sooner_it_gives_up_what_does_not_pay(rows: int, most: int) -> None:
    asked, _ = World(rows, right=0.05, said=0.3).run(AdaptiveBudget(TABLE), 40)
    assert 0 < np.count_nonzero(asked) <= most


def test_looks_take_little_time_where_drafting_does_not_pay_and_it_drafts_again_where_it_does() -> None:
    budget = AdaptiveBudget(TABLE)
    world = World(8, right=0.05, said=0.3)
    world.run(budget, 100)
    asked, rate = world.run(budget, 2000)
    assert any(asked)
    assert rate > 0.97 * world.plain_rate
    asked, _ = World(8, right=0.9, said=0.3).run(budget, 2000)
    assert all(asked[-300:])


def test_looks_that_lose_little_are_taken_often() -> None:
    """The less a try loses, the sooner is the next one, so that a change of the text is found soon."""
    hardly, dear = replace(TABLE, verify=TABLE.verify.clip(max=1.02)), TABLE
    looks = []
    for table in (hardly, dear):
        world = World(1, right=0.01, said=0.3, table=replace(table, draft=0 * table.draft))
        budget = AdaptiveBudget(world.table)
        world.run(budget, 500)
        asked, rate = world.run(budget, 1000)
        assert rate > 0.97 * world.plain_rate
        looks.append(sum(1 for one in asked if one))
    assert looks[0] > 2 * looks[1] > 0


class SparseWorld(World):
    """A drafter that has nothing to say in two steps of three, and is right in the others."""

    def chain(self, share: float, nodes: int) -> Floats:
        log_probs = super().chain(share, nodes)
        said = next(_SPEAKS)
        return log_probs if said else np.full_like(log_probs, -np.inf)


_SPEAKS = itertools.cycle([True, False, False])


def test_a_drafter_that_often_has_nothing_to_say_is_not_taken_for_wrong() -> None:
    """A lone root promises nothing, so it breaks no promise."""
    world = SparseWorld(1, right=0.9, said=0.9)
    asked, rate = world.run(AdaptiveBudget(TABLE), 1000)
    assert asked[-300:].count(0) < 30
    assert rate > 1.3 * world.plain_rate


def test_a_modest_drafter_is_found_out() -> None:
    """It says that drafting does not pay; what is accepted says that it does."""
    asked, _ = World(1, right=0.8, said=0.2).run(AdaptiveBudget(TABLE), 1500)
    assert all(asked[-200:])


def test_costs_that_differ_from_the_table_are_learnt() -> None:
    """Drafting takes thirty times as long as when it was measured."""
    real = World(8, right=0.6, said=0.6, table=replace(TABLE, draft=30 * TABLE.draft))
    asked, rate = real.run(AdaptiveBudget(TABLE), 2000)
    assert asked[0] > 0
    assert asked[-300:].count(0) > 280
    assert rate > 0.9 * real.plain_rate


def test_trees_pay_more_where_plain_steps_have_become_slow() -> None:
    """Handing out tokens, say, costs as much with every step, however many they are."""
    budget = AdaptiveBudget(TABLE)
    quiet, busy = World(8, right=0.25, said=0.25), World(8, 0.25, 0.25, replace(TABLE, verify=TABLE.verify + 40))
    asked, _ = quiet.run(budget, 600)
    assert asked[-300:].count(0) > 270
    asked, _ = busy.run(budget, 1500)
    assert all(asked[-200:])


def test_what_one_row_costs_says_nothing_of_many() -> None:
    budget = AdaptiveBudget(TABLE)
    dear_alone = replace(TABLE, draft=np.array([[0.0, 100.0, 100.0], [0.0, 0.5, 0.5]]))
    asked, _ = World(1, 0.8, 0.8, dear_alone).run(budget, 1000)
    assert asked[-100:].count(0) > 90
    asked, _ = World(8, 0.8, 0.8, dear_alone).run(budget, 60)
    assert all(asked)


def test_a_plain_step_that_seemed_slow_at_start_is_tried_though_drafting_seems_to_pay() -> None:
    """Something else slowed the machine while plain steps were measured, and only then."""
    slow_plain = replace(TABLE, verify=np.array([[1.0, 1.2, 1.5], [4.5, 5.0, 12.0]]))
    budget, world = AdaptiveBudget(slow_plain), World(8, right=0.5, said=0.5)
    asked, _ = world.run(budget, 60)
    assert all(asked)
    world.run(budget, 2500)
    asked, rate = world.run(budget, 1000)
    assert asked.count(0) > 900
    assert rate > 0.95 * world.plain_rate


def test_plain_steps_that_tell_what_they_take_cost_little_where_drafting_pays() -> None:
    world = World(1, right=0.9, said=0.9)
    asked, _ = world.run(AdaptiveBudget(TABLE), 5000)
    assert 24 <= asked.count(0) <= 48


def test_the_load_of_a_step_decides_whether_drafting_pays() -> None:
    """A tree costs attention to a long text for each node, and a choice at each level where all levels choose."""
    dear = replace(TABLE, longer=np.array([0.0, 0.01, 0.02]), choosing={"filtered": np.array([2.0, 2.0])})
    dear = replace(dear, choices=np.array([1.0, 5.0, 9.0]))
    budget = AdaptiveBudget(dear)
    World(1, right=0.7, said=0.7, table=dear).run(budget, 300)
    loads = (StepLoad(1), StepLoad(1, 5000.0), StepLoad(1, 0.0, "filtered"))
    assert [budget.band(1).best(load)[1] for load in loads] == [8, 0, 0]
    assert budget.plan(StepLoad(1)).nodes == 8
    assert budget.plan(StepLoad(1, 100.0)).nodes == 4


def test_costs_that_are_learnt_at_one_load_hold_at_others() -> None:
    """All takes twice as long as the table says, at whatever length."""
    said = replace(TABLE, longer=np.array([0.1, 0.1, 0.1]))
    budget = AdaptiveBudget(said)
    nothing = np.zeros((1, 0))
    for length in (0.0, 50.0) * 200:
        load = StepLoad(1, length)
        taken = 2 * float(said.costs(1).seconds(load, np.ones(3))[0])
        budget.observe(StepObservation(load, 0, nothing, nothing, nothing == 0, StepSeconds(0.0, 0.0, taken)))
    assert budget.band(1).step_seconds(StepLoad(1, 20.0), 0) == pytest.approx(2 * (1.0 + 20 * 0.1), rel=0.01)


@given(st.integers(1, 5))
def test_planning_changes_nothing(rows: int) -> None:
    budget = AdaptiveBudget(TABLE)
    asked = budget.plan(StepLoad(rows))
    assert budget.plan(StepLoad(rows)) == asked
    assert asked.least_probability == 1 / (asked.nodes + 1)


def test_one_step_that_was_held_up_changes_little() -> None:
    budget = AdaptiveBudget(TABLE)
    world = World(1, right=0.8, said=0.8)
    world.run(budget, 100)
    asked = budget.plan(StepLoad(1)).nodes
    nothing = np.zeros((1, asked))
    budget.observe(StepObservation(StepLoad(1), asked, nothing, nothing, nothing == 0, StepSeconds(100.0, 50.0, 50.0)))
    assert all(world.run(budget, 50)[0])

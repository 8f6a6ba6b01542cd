"""The choice between drafters in a world whose costs and acceptance are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.choosing_budget import ChoosingBudget
from drafter.budget.contract import StepLoad, StepObservation, StepSeconds
from drafter.budget.latency_table import LatencyTable
from drafter.drafters.contract import Ask

BASE = LatencyTable(
    batches=np.array([1.0, 8.0]),
    nodes=(0, 3, 7, 15),
    verify=np.array([[1.0, 1.1, 1.3, 1.7], [2.0, 3.0, 5.0, 9.0]]),
    draft=np.zeros((2, 4)),
)


class Members:
    """Drafters of chains: member `m` is right about a token with `right[m]`, and drafts in `costs[m]` seconds."""

    def __init__(self, right: list[float], costs: list[float], seed: int = 0) -> None:
        self.right, self.costs = right, costs
        self.tables = [replace(BASE, draft=np.array([[0.0, cost, cost, cost]] * 2)) for cost in costs]
        self.random = np.random.default_rng(seed)
        self.asked: list[Ask] = []

    def budget(self) -> ChoosingBudget:
        names = [f"member {member}" for member in range(len(self.right))]
        return ChoosingBudget(names, [AdaptiveBudget(table) for table in self.tables])

    def run(self, budget: ChoosingBudget | AdaptiveBudget, rows: int, steps: int) -> float:
        """Tokens per second and row."""
        tokens = seconds = 0.0
        self.asked = []
        for _ in range(steps):
            ask = budget.plan(StepLoad(rows))
            self.asked.append(ask)
            right = self.right[ask.member]
            promised = np.log(max(right, 1e-3)) * np.tile(np.arange(1.0, ask.nodes + 1), (rows, 1))
            accepted = (self.random.random((rows, ask.nodes)) < right).cumprod(1).astype(bool)
            verify, draft = self.tables[ask.member].at(rows)
            place = BASE.nodes.index(ask.nodes)
            taken = StepSeconds(0.0, float(draft[place]), float(verify[place]))
            budget.observe(StepObservation(StepLoad(rows), ask.nodes, promised, promised, accepted, taken, ask.member))
            tokens += 1 + accepted.sum() / rows
            seconds += taken.drafting + taken.rest
        return float(tokens / seconds)

    def alone(self, rows: int, member: int) -> float:
        """The rate of the best number of nodes of one member, plain decoding included."""
        verify, draft = self.tables[member].at(rows)
        gains = [sum(self.right[member] ** depth for depth in range(1, nodes + 1)) for nodes in BASE.nodes]
        return float(max((1 + gain) / (v + d) for gain, v, d in zip(gains, verify, draft, strict=True)))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("right", "costs"),
    [
        ([0.8, 0.3, 0.2], [0.1, 0.01, 0.01]),  # the first is the best
        ([0.3, 0.2, 0.8], [0.3, 0.01, 0.01]),  # the last
        ([0.8, 0.7], [1.5, 0.01]),  # the more accurate one is too dear
        ([0.02, 0.02, 0.02], [0.1, 0.05, 0.05]),  # none pays
        ([0.6, 0.6, 0.6, 0.6], [0.05, 0.05, 0.05, 0.05]),
    ],
)
def test_it_settles_on_the_best_and_looking_costs_little(rows: int, right: list[float], costs: list[float]) -> None:
    world = Members(right, costs)
    budget = world.budget()
    rate = world.run(budget, rows, 3000)
    best = max(world.alone(rows, member) for member in range(len(right)))
    assert rate > 0.94 * best
    assert rate > 0.96 / float(BASE.at(rows)[0][0])
    later = world.asked[-1000:]
    (choice,) = budget.choices()
    assert choice.members[int(choice.chosen.split()[-1])].rate > 0.9 * best
    if len(set(right)) > 1 or len(set(costs)) > 1:
        drafted = [ask.member for ask in later if ask.nodes]
        most = max(range(len(right)), key=lambda member: world.alone(rows, member))
        assert (
            not drafted
            or max(set(drafted), key=drafted.count) == most
            or world.alone(rows, most) <= 1 / float(BASE.at(rows)[0][0])
        )


@pytest.mark.parametrize(("rows", "steps", "most"), [(1, 600, 20), (8, 150, 5)])
def test_a_trial_of_a_member_that_is_clearly_slower_is_short(rows: int, steps: int, most: int) -> None:
    world = Members([0.9, 0.1], [0.01, 0.5])
    world.run(world.budget(), rows, steps)
    assert 0 < sum(ask.member == 1 for ask in world.asked) <= most


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("steps", [50, 100, 200])
def test_a_short_run_is_not_spent_on_finding_out(rows: int, steps: int) -> None:
    plain = 1 / float(BASE.at(rows)[0][0])
    for seed in range(4):
        useless = Members([0.02] * 4, [0.1, 0.05, 0.05, 0.05], seed)
        assert useless.run(useless.budget(), rows, steps) > 0.94 * plain
        good = Members([0.6, 0.3, 0.2, 0.25], [0.1, 0.05, 0.05, 0.05], seed)
        assert good.run(good.budget(), rows, steps) > 0.8 * good.alone(rows, 0)


def test_it_finds_another_when_the_text_changes() -> None:
    world = Members([0.8, 0.1], [0.05, 0.05])
    budget = world.budget()
    world.run(budget, 1, 2000)
    assert budget.choices()[0].chosen == "member 0"
    world.right = [0.1, 0.8]
    world.run(budget, 1, 4000)
    assert budget.choices()[0].chosen == "member 1"


def test_each_batch_size_has_a_choice_of_its_own() -> None:
    """A dear draft pays where a step is dear."""
    world = Members([0.85, 0.4], [1.0, 0.01])
    world.tables[0] = replace(BASE, draft=np.array([[0, 9.0, 9.0, 9.0], [0, 0.01, 0.01, 0.01]]))
    budget = world.budget()
    world.run(budget, 1, 1500)
    world.run(budget, 8, 1500)
    alone, many = budget.choices()
    assert (alone.rows, alone.chosen, many.rows, many.chosen) == (1, "member 1", 8, "member 0")


def test_what_is_known_of_one_batch_size_spares_trials_at_another() -> None:
    """What a tree brings follows from drafter and text, and what it costs from the batch size: at 8 rows much."""
    world = Members([0.02, 0.01, 0.02], [0.01, 0.01, 0.01])
    budget = world.budget()
    world.run(budget, 1, 500)
    world.run(budget, 8, 200)
    assert not any(ask.nodes for ask in world.asked[:30])
    assert sum(ask.nodes > 0 for ask in world.asked) <= 3  # a look
    assert budget.choices()[1].rows == 8  # the report has it


def test_the_best_at_one_batch_size_is_tried_first_at_another() -> None:
    world = Members([0.02, 0.1, 0.97], [0.01, 0.01, 0.01])
    budget = world.budget()
    world.run(budget, 1, 500)
    world.run(budget, 8, 200)
    assert {ask.member for ask in world.asked if ask.nodes} == {2}


def test_what_did_not_pay_at_one_batch_size_and_was_never_tried_at_another_is_tried_at_last() -> None:
    world = Members([0.1, 0.02], [0.01, 0.01])
    budget = world.budget()
    world.run(budget, 1, 500)
    world.right = [0.97, 0.02]
    world.run(budget, 8, 3000)
    assert budget.choices()[1].chosen == "member 0"
    assert sum(ask.nodes > 0 for ask in world.asked) > 1500


@settings(max_examples=10, derandomize=True)  # chance may always be worse once
@given(
    right=st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4), seed=st.integers(0, 99), rows=st.sampled_from([1, 8])
)
def test_planning_changes_nothing_and_the_regret_is_bounded(right: list[float], seed: int, rows: int) -> None:
    world = Members(right, [0.02 * (member + 1) for member in range(len(right))], seed)
    budget = world.budget()
    assert budget.plan(StepLoad(rows)) == budget.plan(StepLoad(rows))
    rate = world.run(budget, rows, 1500)
    assert rate > 0.88 * max(world.alone(rows, member) for member in range(len(right)))


def test_a_member_that_is_withheld_drafts_only_once_it_is_renewed() -> None:
    world = Members([0.3, 0.2, 0.9], [0.01, 0.01, 0.01])
    names = ["a", "b", "learnt"]
    budget = ChoosingBudget(names, [AdaptiveBudget(table) for table in world.tables], withheld=[2])
    world.run(budget, 8, 800)
    assert {ask.member for ask in world.asked} == {0, 1}
    assert all({view.name for view in choice.members} == {"a", "b"} for choice in budget.choices())
    budget.renewed(2)
    assert all({view.name for view in choice.members} == {"a", "b"} for choice in budget.choices())  # it is untried
    rate = world.run(budget, 8, 800)
    assert sum(ask.member == 2 for ask in world.asked) > 700
    assert rate > 0.9 * world.alone(8, 2)
    assert all({view.name for view in choice.members} == set(names) for choice in budget.choices())


def test_the_first_member_may_be_withheld() -> None:
    world = Members([0.9, 0.3], [0.01, 0.01])
    budget = ChoosingBudget(["learnt", "a"], [AdaptiveBudget(table) for table in world.tables], withheld=[0])
    world.run(budget, 1, 100)
    assert {ask.member for ask in world.asked} == {1}


def test_a_member_that_was_worth_nothing_is_tried_soon_after_it_is_renewed() -> None:
    world = Members([0.4, 0.02], [0.01, 0.3])
    budget = world.budget()
    world.run(budget, 4, 2000)
    world.right[1] = 0.95
    budget.renewed(1)
    world.run(budget, 4, 60)
    assert sum(ask.member == 1 for ask in world.asked) > 30


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("right", [[0.8, 0.3], [0.02, 0.01]])
def test_the_estimated_speedup_is_the_real_one(rows: int, right: list[float]) -> None:
    world = Members(right, [0.05, 0.01])
    budget = world.budget()
    rate = world.run(budget, rows, 1000)
    (choice,) = budget.choices()
    assert choice.sums.speedup == pytest.approx(rate * float(BASE.at(rows)[0][0]))
    assert (choice.sums.steps, choice.sums.row_steps) == (1000, 1000 * rows)
    assert choice.sums.plain == sum(not ask.nodes for ask in world.asked)
    assert choice.verdict is not None
    assert choice.verdict.drafts == (sum(ask.nodes > 0 for ask in world.asked[-200:]) > 100)


def test_what_is_told_of_members_never_contradicts_the_choice() -> None:
    """The text turns bad for the leader: what was believed of the other one before is by then the higher estimate."""
    world = Members([0.85, 0.8], [0.01, 0.01])
    budget = world.budget()
    world.run(budget, 1, 400)
    contradicted = False
    for right in (0.85, 0.1):
        world.right = [right, right]
        for _ in range(30):
            world.run(budget, 1, 10)
            (choice,) = budget.choices()
            rates = {view.name: view.rate for view in choice.members}
            contradicted |= max(rates.values()) > 1.02 * rates[choice.chosen]
            for view in choice.members:
                assert (view.beside is None) == (view.name == choice.chosen)
                assert view.relative <= 1.02
    assert contradicted

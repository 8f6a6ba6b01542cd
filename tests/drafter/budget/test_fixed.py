from __future__ import annotations

from drafter.budget.contract import FixedBudget


def test_a_fixed_budget_is_fixed() -> None:
    budget = FixedBudget(4)
    assert budget.plan(1).nodes == budget.plan(8).nodes == 4

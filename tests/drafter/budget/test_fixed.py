from __future__ import annotations

from drafter.budget.contract import FixedBudget, StepLoad


def test_a_fixed_budget_is_fixed() -> None:
    budget = FixedBudget(4)
    assert budget.plan(StepLoad(1)).nodes == budget.plan(StepLoad(8, 5000.0, "filtered")).nodes == 4

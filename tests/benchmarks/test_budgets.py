"""The policies that are compared."""

from __future__ import annotations

import pytest

from benchmarks.budgets import POLICIES
from drafter.budget import adaptive


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_constants_are_the_budgets_own_and_come_back(name: str) -> None:
    before = dict(vars(adaptive))
    with POLICIES[name].applied():
        changed = {key for key, value in vars(adaptive).items() if before.get(key) is not value}
        assert changed == {constant for constant, _ in POLICIES[name].constants}
    assert dict(vars(adaptive)) == before

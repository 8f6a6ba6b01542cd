"""What is in flight, and who is blamed for a death."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.ledger import ROW_ATTEMPTS, EnoughRowsError, Ledger, RowKey, RowOutcome, SavedRow

DONE = RowOutcome(generated={"token_ids": [1]})


def keys(*names: str) -> list[RowKey]:
    return [RowKey("p", name) for name in names]


def test_rows_that_were_inside_at_a_death_are_suspects_and_finished_ones_are_kept() -> None:
    ledger = Ledger()
    assert ledger.open_part("p", 4) == ({}, {})
    ledger.exchange("engine", {}, keys("a", "b", "c"))
    ledger.exchange("engine", {RowKey("p", "a"): DONE}, [])
    assert ledger.open_part("p", 4) == ({"a": DONE}, {"b": 1, "c": 1})
    # Nobody was inside: a part that is opened once more blames nobody.
    assert ledger.open_part("p", 4) == ({"a": DONE}, {"b": 1, "c": 1})
    assert ledger.counts().rows_again == 2


def test_a_row_with_too_many_deaths_is_set_aside() -> None:
    ledger = Ledger()
    ledger.open_part("p", 2)
    for _ in range(ROW_ATTEMPTS):
        ledger.exchange("engine", {}, keys("a", "b"))
        ledger.exchange("engine", {RowKey("p", "b"): DONE}, [])
        outcomes, _ = ledger.open_part("p", 2)
    problem = outcomes["a"].problem
    assert problem is not None
    assert (problem["type"], problem["attempts"]) == ("EngineDied", ROW_ATTEMPTS)
    assert outcomes["b"] == DONE
    assert ledger.counts().uncommitted == 1
    assert not ledger.is_committed("p")
    ledger.commit("p")
    assert ledger.is_committed("p")
    assert ledger.counts().uncommitted == 0
    assert ledger.save() == []


def test_an_engine_that_never_finishes_a_row_is_given_up() -> None:
    ledger = Ledger()
    assert all(ledger.arrive("one") for _ in range(20))
    assert not ledger.arrive("one")
    assert ledger.arrive("another")
    ledger.exchange("one", {RowKey("p", "a"): DONE}, [])
    assert ledger.arrive("one")
    assert ledger.counts().engine_deaths == 21


def test_all_engines_have_the_base_of_the_first() -> None:
    ledger = Ledger()
    assert not ledger.has_loaded()
    assert ledger.loaded("x") == "x"
    assert ledger.loaded("y") == "x"
    assert ledger.has_loaded()
    assert Ledger(base="x").loaded("y") == "x"


def test_nothing_enters_while_the_job_is_stopping() -> None:
    ledger = Ledger()
    ledger.open_part("p", 2)
    assert ledger.exchange("engine", {}, keys("a"))
    ledger.drain()
    assert not ledger.exchange("engine", {}, keys("b"))
    assert ledger.counts().inside == 1
    assert not ledger.exchange("engine", {RowKey("p", "a"): DONE}, [])
    assert ledger.counts().inside == 0


def test_the_next_submission_knows_what_the_last_one_knew() -> None:
    first = Ledger()
    first.open_part("p", 4)
    first.exchange("engine", {}, keys("a", "b", "c"))
    first.open_part("p", 4)
    first.exchange("engine", {RowKey("p", "a"): DONE}, keys("b"))
    second = Ledger(first.save())
    assert second.counts().uncommitted == 0
    assert second.open_part("p", 4) == ({"a": DONE}, {"a": 1, "b": 1, "c": 1})


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=4), max_size=12))
def test_only_rows_that_saw_enough_deaths_are_set_aside(deaths: list[set[str]]) -> None:
    ledger = Ledger()
    ledger.open_part("p", 6)
    for inside in deaths:
        ledger.exchange("engine", {}, keys(*sorted(inside)))
        ledger.open_part("p", 6)
    seen = Counter(name for inside in deaths for name in inside)
    outcomes, counted = ledger.open_part("p", 6)
    assert counted == seen
    assert set(outcomes) == {name for name, number in seen.items() if number >= ROW_ATTEMPTS}


def test_rows_that_leave_after_the_last_valid_one_that_is_wanted_do_not_count() -> None:
    valid = RowOutcome(generated={"finish_reason": "stop"})
    cut = RowOutcome(generated={"finish_reason": "length"})
    whole = RowOutcome(generated={"finish_reason": "length", "valid": True})
    saved = SavedRow("p", "before", {"finish_reason": "stop"}, None, 0)
    ledger = Ledger([saved], wanted=3)
    assert ledger.exchange("engine", {RowKey("p", "a"): cut, RowKey("p", "b"): valid}, keys("c", "d", "e", "f"))
    left = {RowKey("p", "c"): cut, RowKey("p", "d"): whole, RowKey("p", "e"): valid, RowKey("q", "g"): valid}
    with pytest.raises(EnoughRowsError):
        ledger.exchange("engine", left, keys("h"))
    with pytest.raises(EnoughRowsError):
        ledger.open_part("q", 1)
    with pytest.raises(EnoughRowsError):
        ledger.exchange("another", {RowKey("q", "g"): valid}, [])
    assert ledger.counts().enough
    assert {row.request_id for row in ledger.save() if row.generated is not None} == {"before", "a", "b", "c", "d"}
    assert not Ledger([saved], wanted=2).counts().enough
    assert Ledger([saved], wanted=1).counts().enough

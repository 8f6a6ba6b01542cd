"""Rates, and the estimate of what plain decoding would take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.statistics import (
    BatchChoice,
    DecodeCounts,
    StepSums,
    Verdict,
    merged_choices,
    per_second,
    rejection_warning,
)

STEPS = st.lists(st.tuples(st.integers(1, 4), st.floats(0.01, 2.0), st.floats(0.01, 2.0)), min_size=2, max_size=20)
"""Rows, seconds, and estimated seconds of plain decoding."""


def sums_of(steps: list[tuple[int, float, float]]) -> StepSums:
    sums = StepSums()
    for rows, seconds, plain_seconds in steps:
        sums.add(rows, rows - 1, seconds, plain_seconds, timed=True, plain=False)
    return sums


def test_a_rate_is_what_was_done_by_the_time_that_it_took() -> None:
    assert per_second(300, 2.0) == 150.0
    assert per_second(0, 0.0) == per_second(5, 0.0) == 0.0


@pytest.mark.parametrize(
    ("drafted", "accepted", "warns"),
    [(200, 19, True), (200, 20, False), (199, 0, False), (1000, 0, True), (0, 0, False)],
)
def test_a_drafter_that_is_hardly_ever_right_is_told_of(drafted: int, accepted: int, warns: bool) -> None:
    counts = DecodeCounts(2000, 5000, drafted, 4 * drafted, accepted)
    assert (rejection_warning(counts) is not None) == warns


def test_the_speedup_is_the_ratio_of_the_times_and_its_margin_tells_how_much_steps_differ() -> None:
    even = sums_of([(4, 1.0, 1.5)] * 10)
    assert (even.speedup, even.steps, even.row_steps) == (1.5, 10, 40)
    assert even.margin == pytest.approx(0.0, abs=1e-6)
    assert even.speculated_share == 0.75
    uneven = sums_of([(4, 1.0, 1.0), (4, 1.0, 2.0)] * 5)
    # The ten plain times differ from their mean by 0.5 s: 1.96 standard errors, with 9 degrees of freedom.
    assert uneven.margin == pytest.approx(1.96 * 0.5 / 9**0.5)
    assert (StepSums().speedup, StepSums().margin, StepSums().speculated_share) == (0.0, None, 0.0)
    assert sums_of([(1, 1.0, 2.0)]).margin is None


@given(first=STEPS, second=STEPS)
def test_sums_of_engines_are_those_of_all_their_steps(
    first: list[tuple[int, float, float]], second: list[tuple[int, float, float]]
) -> None:
    both, together = sums_of(first).plus(sums_of(second)), sums_of([*first, *second])
    assert vars(both) == pytest.approx(vars(together))
    assert both.speedup == pytest.approx(together.speedup)


def test_what_several_engines_have_chosen_is_told_by_the_one_that_has_seen_most() -> None:
    little, much = sums_of([(4, 1.0, 1.0)] * 2), sums_of([(4, 1.0, 2.0)] * 6)
    small = BatchChoice(1, "memory", 1, (), None, little)
    pays, pays_not = Verdict(3, 0.1, 0.2), Verdict(3, 0.1, 0.05)
    found = merged_choices(
        [[small, BatchChoice(4, "memory", 1, (), pays_not, little)], [BatchChoice(4, "head", 2, (), pays, much)], []]
    )
    assert [(one.rows, one.chosen, one.verdict, one.sums.steps) for one in found] == [
        (1, "memory", None, 2),
        (4, "head", pays, 8),
    ]
    assert found[1].sums.speedup == pytest.approx(14 / 8)
    assert (pays.drafts, pays_not.drafts) == (True, False)
    assert merged_choices([]) == ()

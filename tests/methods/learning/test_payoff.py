from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.learning.payoff import (
    Balance,
    Evaluation,
    Interval,
    Point,
    benefit,
    chosen_share,
    curve_of,
    expected_growth,
    gain_by_beta,
    gain_by_choice,
    lead_by_choice,
)
from drafter.statistics import BatchChoice, MemberView, StepSums

INTERVALS = st.builds(
    Interval,
    seconds=st.just(0.0) | st.floats(0.01, 100.0),
    tokens=st.integers(0, 10_000),
    row_steps=st.integers(0, 5_000),
    learned=st.booleans(),
    gain=st.floats(0.1, 5.0),
)


def test_a_balance_of_literal_intervals() -> None:
    balance = Balance().after(Interval(10.0, 1000, 500, learned=False))
    assert (balance.seconds, balance.resting_rate, balance.beta) == (10.0, 100.0, 2.0)
    balance = balance.after(Interval(10.0, 900, 450, learned=True, gain=1.5))
    assert balance.drag == pytest.approx(0.1)  # 90 tokens a second instead of 100
    assert balance.taken == pytest.approx(1.0)
    assert balance.saved == pytest.approx(5.0)  # these tokens would have taken 15 seconds
    assert balance.lost == pytest.approx(-4.0)


def test_an_interval_in_which_engines_were_idle_says_nothing_of_speeds() -> None:
    balance = Balance().after(Interval(10.0, 1000, 500, learned=False))
    after = balance.after(Interval(10.0, 100, 50, learned=False, full=False))
    assert after == replace(balance, seconds=20.0)


def test_a_head_that_gets_better_does_not_make_its_learner_free() -> None:
    balance, rate = Balance(), 1000.0
    for turn in range(12):
        for place in range(17):
            learned = turn > 0 and place > 0  # now and then it rests for an interval
            rate *= 1.01
            tokens = rate * (0.8 if learned else 1.0)
            balance = balance.after(Interval(1.0, round(tokens), round(tokens / 2), learned))
    assert balance.drag == pytest.approx(0.2, abs=0.03)


def test_texts_that_get_slower_do_not_make_a_learner_dear() -> None:
    balance, rate = Balance(), 100_000.0
    for place in range(200):
        learned = place >= 3 and place % 17 != 0
        rate *= 0.998
        tokens = rate * (0.95 if learned else 1.0)
        balance = balance.after(Interval(1.0, round(tokens), round(tokens / 2), learned))
    assert balance.drag == pytest.approx(0.05, abs=0.02)


def test_what_was_learnt_saves_only_where_it_drafts() -> None:
    assert chosen_share([], ["head"]) == 1.0  # it drafts alone
    assert chosen_share([choice("head", 0, head=3)], ["head"]) == 0.0  # nothing is known yet
    both = [choice("head", 3, ngram=150, head=300), choice("ngram", 1, ngram=100, head=90)]
    assert chosen_share(both, ["head"]) == 0.75


@given(intervals=st.lists(INTERVALS, max_size=20))
def test_no_interval_takes_more_than_it_lasts(intervals: list[Interval]) -> None:
    balance = Balance()
    for interval in intervals:
        after = balance.after(interval)
        assert after.seconds == balance.seconds + interval.seconds
        assert 0.0 <= after.taken - balance.taken <= interval.seconds + 1e-9
        assert after.taken == balance.taken or interval.learned
        assert after.saved >= balance.saved
        assert 0.0 <= after.drag < 1.0 or not after.learning_rate
        balance = after


def choice(chosen: str, steps: int, **rates: float) -> BatchChoice:
    views = tuple(MemberView(name, rate, 7, rate) for name, rate in rates.items())
    return BatchChoice(4, chosen, 1, views, sums=StepSums(steps=steps))


def test_the_gain_of_a_head_among_others_is_what_it_is_faster_than_the_best_of_these() -> None:
    assert gain_by_choice([], ["head"]) == 1.0
    assert gain_by_choice([choice("head", 3, memory=100, ngram=150, head=300)], ["head"]) == 2.0
    # Where another drafts, nothing is gained, whatever is believed of the head.
    assert gain_by_choice([choice("ngram", 3, memory=100, ngram=150, head=300)], ["head"]) == 1.0
    both = [choice("head", 3, ngram=150, head=300), choice("ngram", 1, ngram=100, head=90)]
    assert gain_by_choice(both, ["head"]) == pytest.approx(1.75)
    assert gain_by_beta(3.0, 2.0) == 1.5
    assert gain_by_beta(1.0, 2.0) == gain_by_beta(1.0, 0.0) == 1.0


def test_a_head_leads_by_how_much_faster_it_is_than_the_best_of_the_others() -> None:
    assert lead_by_choice([], ["head"]) is None
    assert lead_by_choice([choice("ngram", 3, ngram=150)], ["head"]) is None
    behind, ahead = choice("ngram", 3, memory=100, ngram=150, head=75), choice("head", 1, memory=100, head=300)
    assert lead_by_choice([behind], ["head"]) == 0.5
    assert lead_by_choice([behind, ahead], ["head"]) == pytest.approx((3 * 0.5 + 3.0) / 4)
    # Where plain decoding is the fastest, it is what all members come to.
    members = MemberView("ngram", 100.0, 0, 80.0), MemberView("head", 100.0, 0, 60.0)
    assert lead_by_choice([BatchChoice(4, "ngram", 1, members, sums=StepSums(steps=3))], ["head"]) == pytest.approx(0.6)


def test_what_others_draft_faster_is_made_up_for_before_anything_is_gained() -> None:
    assert benefit(100.0, 2.0) == pytest.approx(50.0)
    assert benefit(100.0, 2.0, lead=1.5) == pytest.approx(50.0)
    assert benefit(100.0, 2.0, lead=0.5) == 0.0
    assert benefit(100.0, 2.0, lead=0.8) == pytest.approx(100.0 * (1 - 1 / 1.6))
    balance = Balance().after(Interval(1.0, 10, 5, learned=False, lead=0.5))
    assert (balance.lead, balance.after(Interval(1.0, 10, 5, learned=False)).lead) == (0.5, 0.5)


def test_a_curve_compares_only_what_was_measured_on_the_same_rows() -> None:
    assert curve_of([]) == []
    found = curve_of(
        [
            Evaluation(10.0, 100, 8, candidate=2.0, published=1.0, better=True),
            Evaluation(20.0, 200, 8, candidate=3.0, published=2.5, better=True),  # easier rows
            Evaluation(30.0, 300, 8, candidate=1.5, published=1.5, better=False),  # the text has changed
            Evaluation(40.0, 400, 8, candidate=1.8, published=1.5, better=True),
        ]
    )
    assert [point.seconds for point in found] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [point.beta for point in found] == pytest.approx([1.0, 2.0, 2.4, 2.4, 2.88])


def test_beta_goes_on_as_the_logarithm_of_the_time() -> None:
    assert expected_growth([], 10.0) is None
    assert expected_growth([Point(0.0, 1.0)], 10.0) is None
    curve = [Point(seconds, 1.0 + math.log1p(seconds)) for seconds in (0.0, 10.0, 30.0)]
    expected = (1.0 + math.log1p(90.0)) / (1.0 + math.log1p(30.0))
    assert expected_growth(curve, 60.0) == pytest.approx(expected)
    assert expected_growth([Point(0.0, 2.0), Point(10.0, 1.5)], 60.0) == 1.0  # it does not get better


POINTS = st.lists(st.builds(Point, st.floats(0.0, 1e4), st.floats(1.0, 10.0)), min_size=2, max_size=8).map(
    lambda points: sorted(points, key=lambda point: point.seconds)
)


@given(curve=POINTS, first=st.floats(0.0, 1e4), more=st.floats(0.0, 1e4))
def test_more_time_never_makes_it_worse(curve: list[Point], first: float, more: float) -> None:
    early, late = expected_growth(curve, first), expected_growth(curve, first + more)
    assert early is not None
    assert late is not None
    assert 1.0 <= early <= late + 1e-9


@given(left=st.floats(-10.0, 1e6), growth=st.floats(0.1, 10.0), more=st.floats(0.0, 5.0))
def test_what_is_left_bounds_what_can_be_saved(left: float, growth: float, more: float) -> None:
    assert 0.0 <= benefit(left, growth) <= max(left, 0.0)
    assert benefit(left, growth) <= benefit(left, growth + more) + 1e-9

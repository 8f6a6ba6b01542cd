"""What a learner records: its balance, its versions, and how decoding went, in bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.learning.learner import HeadVersion
from drafter.methods.learning.payoff import Evaluation, Interval
from pipeline.learning.record import LearningRecord, Published
from pipeline.progress.board import Moment, together

FOUND = Evaluation(seconds=4.0, steps=9, rows=3, candidate=1.5, published=1.0, better=True)


def interval(tokens: int, *, learned: bool = False, gain: float = 1.0) -> Interval:
    return Interval(seconds=2.0, tokens=tokens, row_steps=50, learned=learned, gain=gain)


def learnt() -> LearningRecord:
    """A rest, then work that makes a version, then work with it."""
    record = LearningRecord()
    record.decoded(interval(100), at=2.0)
    record.evaluated(FOUND)
    record.published(HeadVersion(1, {}, beta=1.5, beta_before=1.0), at=3.0)
    record.decoded(interval(80, learned=True, gain=1.5), at=4.0)
    return record


def test_a_record_holds_what_was_measured() -> None:
    record = learnt()
    assert record.evaluations == [FOUND]
    assert record.versions == [Published(3.0, 1, 1.5, 1.0)]
    assert record.moments == [Moment(2.0, 2.0, 100, 50, 0.0, None), Moment(4.0, 2.0, 80, 50, 2.0, 1)]
    assert record.gain == 1.5
    assert record.beta_before == 2.0  # of the interval before the version
    assert record.balance.taken == pytest.approx(2.0 * 0.2)  # 40 tokens/s instead of 50
    assert record.balance.saved == pytest.approx(1.0)


def test_another_submission_goes_on_with_it() -> None:
    record = learnt()
    again = LearningRecord.of_json(record.as_json())
    assert (again.balance, again.evaluations, again.versions, again.moments) == (
        record.balance,
        record.evaluations,
        record.versions,
        record.moments,
    )
    # What was learnt goes on saving, by as much as before.
    assert (again.gain, again.beta_before) == (record.gain, record.beta_before) == (1.5, 2.0)
    # Speeds are of machines.
    anew = again.restarted(shares=True)
    assert (anew.balance.rate, anew.balance.taken) == (0, record.balance.taken)
    assert (anew.gain, anew.beta_before) == (1.5, 2.0)


def test_a_learner_with_cores_of_its_own_is_not_taken_to_cost_anything() -> None:
    assert LearningRecord().restarted(shares=True).balance.drag > 0
    record = LearningRecord().restarted(shares=False)
    record.decoded(interval(100, learned=True), at=2.0)
    assert record.balance.taken == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"balance": {"colour": 1}}'])
def test_a_damaged_record_is_no_record(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        LearningRecord.of_json(text)


def test_who_wants_the_head_itself_learns_to_the_end() -> None:
    record = LearningRecord()
    assert not record.decide(1e9, must_pay=True).learns  # nothing has been measured
    assert record.decide(0.0, must_pay=False).learns


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_moments_that_become_one_keep_their_sums(tokens: list[int], most: int) -> None:
    moments = [Moment(float(at), 1.0, count, count, at % 2, at) for at, count in enumerate(tokens)]
    found = together(moments, most)
    assert 0 < len(found) <= most or len(moments) <= most
    for name in ("seconds", "tokens", "row_steps", "learned"):
        assert sum(getattr(one, name) for one in found) == sum(getattr(one, name) for one in moments)
    assert (found[-1].at, found[-1].version) == (moments[-1].at, moments[-1].version)

"""Whether learning pays, in jobs whose speeds are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.methods.learning.payoff import MOST_LOST, Balance, Course, Interval, Point, decide, hopes

SECONDS = 3.0


@dataclass
class Job:
    """A job of `tokens` tokens whose head has `beta(seconds)` after it has learnt for so long.

    Args:
        tokens: To generate.
        slope: How steeply β grows with the logarithm of the seconds, from 1.0.
        most: β grows no further.
        drag: Share of the speed that goes while the learner works.
        change: Tokens after which the text changes, and the head is worth nothing.
        pace: Steps of rows in a second.
        others: β of a drafter that learns nothing, and drafts where the head has less.
    """

    tokens: float
    slope: float
    most: float = 6.0
    drag: float = 0.2
    change: float = math.inf
    pace: float = 100.0
    others: float = 1.0
    taken: float = 0.0
    learnt: float = 0.0
    since_change: float = 0.0
    balance: Balance = field(default_factory=Balance)
    course: Course = field(default_factory=Course)
    curve: list[Point] = field(default_factory=lambda: [Point(0.0, 1.0)])
    learning: list[bool] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def run(self, *, learns: bool = True) -> float:
        """Seconds of the whole job."""
        made, seconds, changed = 0.0, 0.0, False
        while made < self.tokens and len(self.learning) < 50_000:
            if made >= self.change and not changed:
                changed, self.since_change = True, 0.0
            works = learns and self.course.learns
            self.learning.append(works)
            self.reasons.append(self.course.reason)
            beta = min(1.0 + self.slope * math.log1p(self.since_change), self.most)
            drafted, lead = max(beta, self.others), beta / self.others
            rate = self.pace * drafted * (1.0 - self.drag * works)
            tokens = rate * SECONDS
            made, seconds = made + tokens, seconds + SECONDS * min((self.tokens - made) / tokens, 1.0)
            if works:
                self.learnt += SECONDS
                self.since_change += SECONDS
                better = min(1.0 + self.slope * math.log1p(self.since_change), self.most)
                self.curve.append(Point(self.learnt, self.curve[-1].beta * better / beta))
            steps, gain = max(int(tokens / drafted), 1), max(lead, 1.0)
            interval = Interval(SECONDS, int(tokens), steps, works, gain, lead if self.learnt else None)
            self.balance = self.balance.after(interval)
            self.course = decide(self.course, self.balance, self.tokens - made, self.curve)
        return seconds


@settings(max_examples=40)
@given(tokens=st.floats(100.0, 300_000.0), drag=st.floats(0.0, 0.9))
def test_a_job_that_cannot_gain_loses_little(tokens: float, drag: float) -> None:
    plain, learning = Job(tokens, 0.0).run(learns=False), Job(tokens, 0.0, drag=drag)
    # What is under way when the limit is reached comes to its end: an interval.
    assert learning.run() <= plain * (1 + 1.5 * MOST_LOST) + SECONDS * drag


def test_a_long_job_gains_and_learning_stops_where_nothing_is_left_to_gain() -> None:
    tokens = 2_000_000.0
    plain, job = Job(tokens, 0.5).run(learns=False), Job(tokens, 0.5, most=3.0)
    assert job.run() < 0.45 * plain
    assert not any(job.learning[-20:])
    assert sum(job.learning) * SECONDS < 600.0


def test_a_head_that_others_outrun_is_given_up_at_once_and_learnt_where_there_is_time() -> None:
    short = Job(300_000.0, 0.3, others=4.0)  # 750 seconds, after which the head would have a β of 3
    plain = short.run(learns=False)
    short = Job(300_000.0, 0.3, others=4.0)
    assert short.run() < 1.005 * plain
    assert 0 < sum(short.learning) < 5
    assert Job(9_000_000.0, 0.6, others=4.0).run() < 0.95 * Job(9_000_000.0, 0.6, others=4.0).run(learns=False)


def test_a_short_job_is_left_alone() -> None:
    job = Job(2_000.0, 0.5)  # 20 seconds
    job.run()
    assert not any(job.learning)
    assert "left" in job.reasons[-1]


def test_little_is_hoped_of_a_minute_and_much_of_an_hour() -> None:
    assert not hopes(150.0).learns
    assert hopes(150.0).reason.startswith("150 s are left")
    assert hopes(3600.0).learns


def test_it_rests_until_it_is_known_how_fast_engines_are() -> None:
    job = Job(2_000_000.0, 0.5)
    job.run()
    assert job.learning.index(True) == 3
    assert "how fast" in job.reasons[2]


def test_it_begins_again_when_the_text_has_changed() -> None:
    job = Job(6_000_000.0, 0.5, most=3.0, change=3_000_000.0)
    job.run()
    places = [place for place, works in enumerate(job.learning) if works]
    pauses = [after - before for before, after in pairwise(places)]
    assert max(pauses) > 500  # between the two texts
    again = places[pauses.index(max(pauses)) + 1]
    assert job.reasons[again].startswith("the text has changed")
    assert len([place for place in places if place >= again]) > 20  # and it learns on


def test_it_rests_now_and_then_to_measure_what_it_costs() -> None:
    job = Job(2_000_000.0, 0.5)
    job.run()
    first = job.learning.index(True)
    assert job.learning[first : first + 40].count(False) in (2, 3)


def test_a_dear_learner_with_little_to_gain_rests() -> None:
    flat = [Point(0.0, 2.0), Point(30.0, 2.01), Point(60.0, 2.02)]
    balance = Balance(500.0, saved=50.0, resting_rate=100.0, beta=2.0, rests=9, difference=0.5)
    rests = decide(Course(learns=True), balance, 20_000.0, flat)
    assert not rests.learns
    assert rests.rest_beta == 2.0
    assert "to take 15.0 s" in rests.reason
    # An endpoint has no end, so that the same is worth its cost there.
    assert decide(Course(learns=True), balance, math.inf, flat).learns


@given(
    lost=st.floats(0.0, 1e4),
    left=st.floats(0.0, 1e7),
    seconds=st.floats(1.0, 1e5),
    learns=st.booleans(),
)
def test_it_never_learns_where_too_much_is_lost_or_nothing_is_left(
    lost: float, left: float, seconds: float, learns: bool
) -> None:
    balance = Balance(seconds, taken=lost, resting_rate=100.0, beta=2.0, rests=9, difference=0.1)
    decided = decide(Course(learns=learns), balance, left, [])
    if lost >= MOST_LOST * (seconds + left / 100.0) or left == 0.0:
        assert not decided.learns
    assert decided.reason

"""Whether a learner works or rests: it must pay. A pure decision from the balance, the curve and what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafter.learning.payoff import Balance, Point, benefit, expected_growth

HORIZON = 30.0
"""Seconds of work that are decided on together: so long it takes about until a better version is there. What pays only
after longer work is looked for at multiples of it."""
MOST_LOST = 0.02
"""Share of a job's time that may be lost to learning and not have come back so far."""
_FIRST_RESTS = 3
"""Intervals of rest before it first works, to measure how fast engines are without it."""
_HOPE = 1.3
"""What a first `HORIZON` is hoped to make of β while nothing has been measured."""
_START = 1.5
"""A learner that rests begins again only if it is expected to bring so many times what it costs."""
_FALLEN = 0.93
"""The text has changed where β has fallen below this share of what it was when learning stopped."""
_FOLLOWS = 0.01
"""Weight of the newest interval in what acceptance is while the learner rests: it changes a little all the time."""
_TURNS = 16
"""One of so many intervals is a rest, so that what the learner costs is known."""
_LOADING = 2.0
"""Seconds by which a job becomes longer, about, while a learner's process begins beside it."""
_MOST_LOADED = 0.01
"""Share of what is left of a job that may be lost to that."""
_LONGEST = 86_400.0
"""Seconds that are looked ahead at most: nobody knows how good a head is after days."""


@dataclass(frozen=True)
class Course:
    """What a learner does.

    Args:
        learns: Whether it works in the next interval.
        reason: Why, in a line for people.
        turn: Intervals since the last rest.
        rest_beta: β of the rows since learning stopped; None while it goes on.
        since: Seconds of work when it began for the text of now: what was measured before says nothing of it.
        target: β that it is to come back to, where the text has changed.
    """

    learns: bool = False
    reason: str = "nothing has been decoded yet"
    turn: int = 0
    rest_beta: float | None = None
    since: float = 0.0
    target: float | None = None


@dataclass(frozen=True)
class _Work:
    """Some time of work, and what is expected of it: all in seconds.

    Args:
        seconds: How long it is.
        saves: By which the job becomes shorter after it.
        takes: By which it makes the job longer.
    """

    seconds: float
    saves: float
    takes: float


def decide(course: Course, balance: Balance, tokens_left: float, curve: Sequence[Point]) -> Course:
    """Decide on the next interval.

    It works if what some horizon of work is expected to save on the tokens left is more than what it takes, and if what
    was lost so far stays within `MOST_LOST` of the job's time. All horizons but the first are left out if they would
    take more than that.

    Args:
        course: What was decided last.
        balance: After the last interval.
        tokens_left: Tokens that are still to be generated.
        curve: How good what is learnt has become; see `curve_of`.
    """
    if not balance.rate:
        return replace(course, learns=False, reason=Course.reason, turn=0)
    if balance.rests < _FIRST_RESTS:
        return replace(course, learns=False, reason="it measures how fast engines are without it", turn=0)
    left, resting = min(tokens_left / balance.rate, _LONGEST), course.rest_beta is not None
    begins = ""
    if course.rest_beta is not None and balance.beta < _FALLEN * course.rest_beta:
        begins = "the text has changed: "
        course = replace(course, since=curve[-1].seconds if curve else 0.0, target=course.rest_beta)
    factor, allowed = _START if resting else 1.0, MOST_LOST * (balance.seconds + left)
    most = (allowed - balance.lost) / balance.drag if balance.drag else math.inf
    works = [_work(course, balance, curve, left, horizon) for horizon in _horizons(min(left / 2, most))]
    best = max(works, key=lambda one: one.saves - factor * one.takes)
    if balance.lost >= allowed:
        why = f"learning has taken {balance.lost:.0f} s more than it has saved, and may take {allowed:.0f} s"
    elif best.saves <= factor * best.takes:
        saves = f"expected to save {best.saves:.1f} s of {left:.0f} s left, and to take {best.takes:.1f} s"
        why = f"{best.seconds:.0f} s more are {saves}"
    elif course.turn >= _TURNS:
        return replace(course, learns=False, reason="it rests for a moment, to measure what it costs", turn=0)
    else:
        saves = f"expected to save {best.saves:.0f} s of {left:.0f} s left, and to take {best.takes:.1f} s"
        why = f"{begins}{best.seconds:.0f} s are {saves}"
        return replace(course, learns=True, reason=why, turn=course.turn + 1, rest_beta=None)
    before = balance.beta if course.rest_beta is None else course.rest_beta
    return replace(course, learns=False, reason=why, turn=0, rest_beta=before + _FOLLOWS * (balance.beta - before))


def hopes(seconds_left: float) -> Course:
    """Whether a learner's process is to begin where decoding takes so many more seconds, and nothing was measured."""
    if _MOST_LOADED * seconds_left < _LOADING:
        return Course(
            reason=f"{seconds_left:.0f} s are left, and its process would take about {_LOADING:.0f} s to begin"
        )
    return decide(Course(), Balance(resting_rate=1.0, rests=_FIRST_RESTS), seconds_left, [])


def _horizons(most: float) -> list[float]:
    """Seconds of work that are looked at: `HORIZON`, and its doubles up to `most`."""
    horizons = [HORIZON]
    while 2 * horizons[-1] <= most:
        horizons.append(2 * horizons[-1])
    return horizons


def _work(course: Course, balance: Balance, curve: Sequence[Point], left: float, horizon: float) -> _Work:
    """What so many seconds of work are expected to bring where `left` seconds of decoding are left."""
    growth = _growth(course, balance, curve, horizon)
    return _Work(horizon, benefit(left - horizon, growth, balance.lead), horizon * balance.drag)


def _growth(course: Course, balance: Balance, curve: Sequence[Point], horizon: float) -> float:
    """How many times its β so many seconds of work are expected to make of a head."""
    growth = expected_growth([point for point in curve if point.seconds >= course.since], horizon)
    if growth is not None:
        return growth
    return _HOPE if course.target is None else max(course.target / max(balance.beta, 1.0), 1.0)

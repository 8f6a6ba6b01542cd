"""Whether a learner works or rests: it must pay. A pure decision from the balance, the curve and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafter.learning.payoff import Balance, Point, benefit, expected_growth

HORIZON = 30.0
"""Seconds of work that are decided on together: so long it takes about until a better version is there."""
MOST_LOST = 0.02
"""Share of a job's time that may be lost to learning and not have come back so far."""
_HOPE = 1.3
"""What a first `HORIZON` is hoped to make of β while nothing has been measured."""
_START = 1.5
"""A learner that rests begins again only if it is expected to bring so many times what it costs."""
_FALLEN = 0.93
"""The text has changed where β has fallen below this share of what it was when learning stopped."""
_TURNS = 16
"""One of so many intervals is a rest, so that what the learner costs is known."""
_LONGEST = 86_400.0
"""Seconds that are looked ahead at most: an endpoint has no end."""


@dataclass(frozen=True)
class Course:
    """What a learner does.

    Args:
        learns: Whether it works in the next interval.
        reason: Why, in a line for people.
        turn: Intervals since the last rest.
        rest_beta: β of the rows when learning stopped; None while it goes on.
    """

    learns: bool = False
    reason: str = "nothing has been decoded yet"
    turn: int = 0
    rest_beta: float | None = None


def decide(course: Course, balance: Balance, tokens_left: float, curve: Sequence[Point]) -> Course:
    """Decide on the next interval.

    It works if what a horizon of work is expected to save on the tokens left is more than what it takes, and if what
    was lost so far and is lost meanwhile stays within `MOST_LOST` of the job's time.

    Args:
        course: What was decided last.
        balance: After the last interval.
        tokens_left: Tokens that are still to be generated; infinite for an endpoint.
        curve: As in `expected_growth`.
    """
    if not balance.rate:
        return replace(course, learns=False, reason=Course.reason, turn=0)
    left = min(tokens_left / balance.rate, _LONGEST)
    growth = expected_growth(curve, HORIZON) or _HOPE
    fallen = course.rest_beta is not None and balance.beta < _FALLEN * course.rest_beta
    if fallen:
        assert course.rest_beta is not None
        growth = max(growth, course.rest_beta / max(balance.beta, 1.0))
    gain, cost = benefit(left - HORIZON, growth), HORIZON * balance.drag
    resting = course.rest_beta is not None
    allowed = MOST_LOST * (balance.seconds + left)
    if balance.lost >= allowed:
        why = f"learning has taken {balance.lost:.0f} s more than it has saved, and may take {allowed:.0f} s"
    elif gain <= (_START if resting else 1.0) * cost:
        why = f"{HORIZON:.0f} s more are expected to save {gain:.1f} s of {left:.0f} s left, and to take {cost:.1f} s"
    elif course.turn >= _TURNS:
        return replace(course, learns=False, reason="it rests for a moment, to measure what it costs", turn=0)
    else:
        begins = "the text has changed: " if fallen else ""
        why = (
            f"{begins}{HORIZON:.0f} s are expected to save {gain:.0f} s of {left:.0f} s left, and to take {cost:.1f} s"
        )
        return Course(True, why, course.turn + 1)
    rest_beta = balance.beta if course.rest_beta is None else max(course.rest_beta, balance.beta)
    return Course(False, why, 0, rest_beta)

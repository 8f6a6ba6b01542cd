"""Cost and benefit of learning during a job, and the decision to learn or rest. Pure functions of measurements.

A learner that shares a machine slows engines down: its cost is the difference in speed with and without it. It saves
the time that the same tokens would have taken with the original drafter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression

from drafter.statistics import BatchChoice, per_second

_PACE = 0.2  # EMA weight of the newest interval
_UNKNOWN_DRAG = 0.3  # share of the engines' speed that a learner is assumed to cost until measured
_SAME_TIME = 1e-6  # log seconds: points closer than this tell no slope
_CLOSE = 4  # intervals after the learner starts or stops that are compared with those just before
_DRAG_PACE = 0.1  # EMA weight of the newest comparison
_POINTS = 5  # newest ones of the learning curve that are extrapolated


@dataclass(frozen=True)
class Interval:
    """A part of a job, during all of which the learner worked (`learned`) or rested."""

    seconds: float
    tokens: int  # new tokens of all engines
    row_steps: int  # decode steps × rows in each
    learned: bool
    gain: float = 1.0  # speed ÷ speed without the learned head; see `gain_by_choice` and `gain_by_beta`
    lead: float | None = None  # see `lead_by_choice`; None where unknown
    full: bool = True  # engines had work all the time; if not, the interval does not count for speeds


@dataclass(frozen=True)
class Balance:
    """Cost and savings of learning in the job's first `seconds`."""

    seconds: float = 0.0
    taken: float = 0.0  # seconds by which the learner has delayed the job
    saved: float = 0.0  # seconds by which the learned head has shortened it
    learning_rate: float = 0.0  # tokens per second when the learner last worked; 0 before
    resting_rate: float = 0.0  # tokens per second when it last rested
    beta: float = 0.0  # EMA of tokens per row and step; 0 before the first interval
    lead: float = 1.0  # speed with the learned head ÷ without; below 1.0 other members draft
    rests: int = 0  # intervals of rest
    worked: bool | None = None  # in the last interval; None before the first
    turn: int = 0  # intervals of the same kind before the last
    difference: float = _UNKNOWN_DRAG  # EMA of the share of speed lost when it started, or regained when it stopped
    compared: int = 0  # values in that EMA

    @property
    def drag(self) -> float:
        """Share of the engines' speed, in [0, 1), that the working learner costs."""
        return max(self.difference, 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second without the learner; 0 before anything is known."""
        return max(self.resting_rate, self.learning_rate)

    @property
    def lost(self) -> float:
        """Seconds taken and not yet saved; negative once learning has paid off."""
        return self.taken - self.saved

    def after(self, interval: Interval) -> Balance:
        """Return the balance after an interval. Intervals without tokens do not count for speeds."""
        balance = replace(self, seconds=self.seconds + interval.seconds)
        if not interval.full or not interval.tokens or not interval.row_steps or interval.seconds <= 0:
            return balance
        lead = self.lead if interval.lead is None else interval.lead
        balance = replace(balance, beta=_average(self.beta, interval.tokens / interval.row_steps), lead=lead)
        balance = balance._with_rate(per_second(interval.tokens, interval.seconds), interval.learned)
        taken = interval.seconds * balance.drag if interval.learned else 0.0
        saved = interval.seconds * max(interval.gain - 1.0, 0.0)
        return replace(balance, taken=self.taken + taken, saved=self.saved + saved)

    def _with_rate(self, rate: float, worked: bool) -> Balance:
        # Speeds drift as heads improve and texts grow, so only rates close to a change of state are compared.
        goes_on = worked == self.worked
        learning, resting, rests, turn = self.learning_rate, self.resting_rate, self.rests, 0
        if worked:
            learning = _average(learning, rate) if goes_on else rate
        else:
            resting, rests = _average(resting, rate) if goes_on else rate, rests + 1
        if goes_on:
            turn = self.turn + 1
        balance = replace(self, learning_rate=learning, resting_rate=resting, rests=rests, worked=worked, turn=turn)
        if turn >= _CLOSE or not learning or not resting:
            return balance
        pace = max(_DRAG_PACE, 1 / (self.compared + 1))
        difference = self.difference + pace * (1.0 - learning / resting - self.difference)
        return replace(balance, difference=difference, compared=self.compared + 1)

    def restarted(self, *, shares: bool) -> Balance:
        """Return the balance for another machine or restarted engines: earlier speeds no longer apply.

        A learner that shares no cores or GPU with engines is assumed to cost nothing until measured.
        """
        return Balance(self.seconds, self.taken, self.saved, difference=_UNKNOWN_DRAG if shares else 0.0)


@dataclass(frozen=True)
class Evaluation:
    """β on held-out rows after some working time."""

    seconds: float
    steps: int
    rows: int
    candidate: float  # β of the current weights
    published: float  # β of the newest version; 1.0 before one
    better: bool  # the candidate was published


@dataclass(frozen=True)
class Point:
    """β after some working time; see `curve_of`."""

    seconds: float
    beta: float


def curve_of(evaluations: Sequence[Evaluation]) -> list[Point]:
    """Return the learning curve on the scale of the first evaluation, in order of time.

    Held-out rows change, so each candidate is only compared with the version before it on the same rows.
    """
    if not evaluations:
        return []
    level = evaluations[0].published
    points = [Point(0.0, level)]
    for one in evaluations:
        points.append(Point(one.seconds, level * one.candidate / one.published))
        if one.better:
            level = points[-1].beta
    return points


def gain_by_choice(choices: Sequence[BatchChoice], learned: Collection[str]) -> float:
    """Return engines' speed ÷ their speed without the members `learned`, by their budgets' estimates; at least 1.0.

    `choices` are `EngineState.choices` of all engines, weighted by their steps.
    """
    leads = (_lead(choice, learned) if choice.chosen in learned else None for choice in choices)
    found = _mean([(choice.sums.steps, max(lead or 1.0, 1.0)) for choice, lead in zip(choices, leads, strict=True)])
    return 1.0 if found is None else found


def lead_by_choice(choices: Sequence[BatchChoice], learned: Collection[str]) -> float | None:
    """Return the speed of the best drafter with the learned head ÷ the best without it; below 1.0 others are faster.

    None where one side has not been tried. Choices are weighted as in `gain_by_choice`.
    """
    return _mean([(choice.sums.steps, lead) for choice in choices if (lead := _lead(choice, learned)) is not None])


def chosen_share(choices: Sequence[BatchChoice], learned: Collection[str]) -> float:
    """Return the share of engines' steps drafted by a member in `learned`; 1.0 without `choices` (one drafter)."""
    if not choices:
        return 1.0
    return _mean([(choice.sums.steps, float(choice.chosen in learned)) for choice in choices]) or 0.0


def _mean(weighted: Sequence[tuple[int, float]]) -> float | None:
    weight = sum(one for one, _ in weighted)
    return sum(one * value for one, value in weighted) / weight if weight else None


def gain_by_beta(beta: float, before: float) -> float:
    """Return the gain where learning leaves a step's cost unchanged: the ratio of β, at least 1.0.

    True where an existing head learns further, and on a GPU, where every step drafts with the head from the start.
    """
    return max(beta / before, 1.0) if before > 0 else 1.0


def expected_growth(curve: Sequence[Point], seconds: float) -> float | None:
    """Return the expected β after `seconds` more of learning ÷ the last β, at least 1.0; None below two points.

    β grows about linearly in log(time); the slope is a least-squares fit to the last points of the curve.
    """
    if len(curve) < 2:
        return None
    some, last = curve[-_POINTS:], curve[-1]
    places = [math.log1p(point.seconds) for point in some]
    if max(places) - min(places) < _SAME_TIME:
        return 1.0
    slope = linear_regression(places, [point.beta for point in some]).slope
    grown = max(slope, 0.0) * (math.log1p(last.seconds + seconds) - math.log1p(last.seconds))
    return 1.0 + grown / last.beta


def benefit(seconds_left: float, growth: float, lead: float = 1.0) -> float:
    """Return the seconds saved, of `seconds_left` at today's speed, if β becomes `growth` ≥ 1 times what it is.

    With `Balance.lead` below 1.0, the faster drafter must be overtaken before anything is gained.
    """
    faster = max(growth * lead, 1.0) / max(lead, 1.0)
    return max(seconds_left, 0.0) * (1.0 - 1.0 / max(faster, 1.0))


def _lead(choice: BatchChoice, learned: Collection[str]) -> float | None:
    """Return `lead_by_choice` at one batch size. The rate without the head is never below plain decoding's."""
    with_it = [one.drafted_rate for one in choice.members if one.name in learned]
    without = [one.rate for one in choice.members if one.name not in learned]
    return max(with_it) / max(without) if with_it and max(without, default=0.0) > 0 else None


def _average(before: float, now: float) -> float:
    return before + _PACE * (now - before) if before else now


# The decision whether the learner works or rests.

HORIZON = 30.0
"""Seconds of work decided on together: about the time to a better version. Longer horizons are its doubles."""
MOST_LOST = 0.02  # share of a job's time that learning may have cost without return
_FIRST_RESTS = 3  # intervals of rest before it first works, to measure the speed without it
_HOPE = 1.3  # assumed growth of β over the first `HORIZON`, before any measurement
_START = 1.5  # a resting learner starts again only if the expected benefit is so many times its cost
_FALLEN = 0.93  # β below this share of its value when learning stopped means that the text has changed
_FOLLOWS = 0.01  # EMA weight of the newest interval in β at rest, which drifts slowly
_TURNS = 16  # intervals of work before one of rest, to measure the learner's cost
_LOADING = 2.0  # approximate seconds that a starting learner process costs the job
_MOST_LOADED = 0.01  # share of the time left that starting the process may cost
_LONGEST = 86_400.0  # seconds of look-ahead


@dataclass(frozen=True)
class Course:
    """A decision about the learner, with the reason in a line for people."""

    learns: bool = False
    reason: str = "nothing has been decoded yet"
    turn: int = 0  # intervals since the last rest
    rest_beta: float | None = None  # EMA of β since learning stopped; None while it works
    since: float = 0.0  # working seconds at which the current text began: earlier points of the curve do not count
    target: float | None = None  # β to recover where the text has changed


def decide(course: Course, balance: Balance, tokens_left: float, curve: Sequence[Point]) -> Course:
    """Decide on the next interval.

    The learner works if some horizon of work is expected to save more on the tokens left than it costs, and if the loss
    so far stays within `MOST_LOST` of the job's time. Horizons beyond the first must fit into that limit.
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
    works = []  # seconds of work, and seconds of the job that it saves later and takes now
    for horizon in _horizons(min(left / 2, most)):
        saves = benefit(left - horizon, _growth(course, balance, curve, horizon), balance.lead)
        works.append((horizon, saves, horizon * balance.drag))
    work, saves, takes = max(works, key=lambda one: one[1] - factor * one[2])
    if balance.lost >= allowed:
        why = f"learning has taken {balance.lost:.0f} s more than it has saved, and may take {allowed:.0f} s"
    elif saves <= factor * takes:
        why = f"{work:.0f} s more are expected to save {saves:.1f} s of {left:.0f} s left, and to take {takes:.1f} s"
    elif course.turn >= _TURNS:
        return replace(course, learns=False, reason="it rests for a moment, to measure what it costs", turn=0)
    else:
        expected = f"expected to save {saves:.0f} s of {left:.0f} s left, and to take {takes:.1f} s"
        why = f"{begins}{work:.0f} s are {expected}"
        return replace(course, learns=True, reason=why, turn=course.turn + 1, rest_beta=None)
    before = balance.beta if course.rest_beta is None else course.rest_beta
    return replace(course, learns=False, reason=why, turn=0, rest_beta=before + _FOLLOWS * (balance.beta - before))


def hopes(seconds_left: float) -> Course:
    """Decide whether to start a learner process for a job of so many more seconds, before any measurement."""
    if _MOST_LOADED * seconds_left < _LOADING:
        return Course(
            reason=f"{seconds_left:.0f} s are left, and its process would take about {_LOADING:.0f} s to begin"
        )
    return decide(Course(), Balance(resting_rate=1.0, rests=_FIRST_RESTS), seconds_left, [])


def _horizons(most: float) -> list[float]:
    horizons = [HORIZON]
    while 2 * horizons[-1] <= most:
        horizons.append(2 * horizons[-1])
    return horizons


def _growth(course: Course, balance: Balance, curve: Sequence[Point], horizon: float) -> float:
    growth = expected_growth([point for point in curve if point.seconds >= course.since], horizon)
    if growth is not None:
        return growth
    return _HOPE if course.target is None else max(course.target / max(balance.beta, 1.0), 1.0)

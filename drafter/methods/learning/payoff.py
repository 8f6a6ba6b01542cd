"""What learning costs a job, what it has saved, and what it may still bring. Pure functions of what was measured.

A learner that shares a machine with engines takes speed from them. What it takes is the difference between the job's
speed with it and without it, measured at times that are close to one another. What it saves is the time that the same
tokens would have taken without what was learnt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from drafter.statistics import BatchChoice, per_second

_PACE = 0.2
"""Weight of the newest interval in the averages."""
_UNKNOWN_DRAG = 0.3
"""Share of the speed that a learner is taken to cost until that has been measured."""
_CLOSE = 4
"""So many intervals after the learner has begun or ceased to work are compared with those just before it."""
_DRAG_PACE = 0.1
"""Weight of the newest comparison."""
_POINTS = 5
"""Newest points of the curve that say how it goes on."""


@dataclass(frozen=True)
class Interval:
    """Some seconds of a job, during all of which the learner worked or rested.

    Args:
        seconds: How long.
        tokens: New tokens of all engines.
        row_steps: Decode steps of all engines, counted once for each row that took part.
        learned: Whether the learner worked.
        gain: How many times as fast as without what was learnt the engines decoded; see `gain_by_choice` and
            `gain_by_beta`.
        lead: See `lead_by_choice`; None where that is not known.
        full: Whether engines had something to decode all the time. If not, it says nothing of speeds.
    """

    seconds: float
    tokens: int
    row_steps: int
    learned: bool
    gain: float = 1.0
    lead: float | None = None
    full: bool = True


@dataclass(frozen=True)
class Balance:
    """What learning has cost a job and what it has saved.

    Args:
        seconds: Of the job so far.
        taken: Seconds by which the learner has made the job longer.
        saved: Seconds by which what was learnt has made it shorter.
        learning_rate: Tokens per second when the learner last worked; 0 before it has.
        resting_rate: The same when it last rested.
        beta: Tokens of a row and step of late; 0 before the first interval.
        lead: How many times as fast as without it engines are where what is learnt drafts; below 1.0 others draft.
        rests: Intervals that have told `resting_rate`.
        worked: Whether the learner worked in the last interval; None before the first one.
        turn: Intervals before that in which it did the same, without a change.
        difference: Share of the speed that went as it began to work, or came as it ceased to: an average.
        compared: Intervals that have told it.
    """

    seconds: float = 0.0
    taken: float = 0.0
    saved: float = 0.0
    learning_rate: float = 0.0
    resting_rate: float = 0.0
    beta: float = 0.0
    lead: float = 1.0
    rests: int = 0
    worked: bool | None = None
    turn: int = 0
    difference: float = _UNKNOWN_DRAG
    compared: int = 0

    @property
    def drag(self) -> float:
        """Share of the engines' speed, in [0, 1), that goes while the learner works."""
        return max(self.difference, 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second of the job while the learner rests; 0 before anything is known."""
        return max(self.resting_rate, self.learning_rate)

    @property
    def lost(self) -> float:
        """Seconds taken that have not come back so far; below 0 where more has been saved."""
        return self.taken - self.saved

    def after(self, interval: Interval) -> Balance:
        """The balance at the end of an interval. One without tokens says nothing of speeds."""
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
        """The balance after an interval of so many tokens per second.

        Speeds change as heads get better and texts longer. So only what was measured shortly before and after the
        learner has begun to work, or ceased to, is compared.
        """
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

    def begun_anew(self, *, shares: bool) -> Balance:
        """The balance for another machine, or for engines that begin anew: what they were like says nothing now.

        Args:
            shares: Whether the learner shares cores or a GPU with engines. If not, it is taken to cost nothing until
                that has been measured.
        """
        return Balance(self.seconds, self.taken, self.saved, difference=_UNKNOWN_DRAG if shares else 0.0)


@dataclass(frozen=True)
class Evaluation:
    """A measurement on held-out rows.

    Args:
        seconds: For which the learner had worked.
        steps: Optimiser steps that it had taken.
        rows: Rows that were measured on.
        candidate: β of what it had learnt by then.
        published: β of the newest version on the same rows; 1.0, plain decoding's, before there is one.
        better: Whether the candidate was published.
    """

    seconds: float
    steps: int
    rows: int
    candidate: float
    published: float
    better: bool


@dataclass(frozen=True)
class Point:
    """How good a head was at a time.

    Args:
        seconds: For which the learner had worked.
        beta: β, as if it had always been measured on the same rows; see `curve_of`.
    """

    seconds: float
    beta: float


def curve_of(evaluations: Sequence[Evaluation]) -> list[Point]:
    """How good what is learnt has become, on the scale of the first evaluation, in the order of time.

    The rows that are measured on change, and with them β. So only what was measured on the same rows is compared: each
    candidate with the version before it.
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
    """How many times as fast as without them the members `learned` let an engine decode, by what its budget believes.

    Args:
        choices: `EngineState.choices`. Batch sizes count by how much has been tried there.
        learned: Names of the members that draft with the learnt head.

    Returns:
        At least 1.0, which it also is where nothing has been chosen yet.
    """
    gain = weight = 0.0
    for choice in choices:
        lead = _lead(choice, learned) if choice.chosen in learned else None
        gain += choice.trials * max(lead or 1.0, 1.0)
        weight += choice.trials
    return gain / weight if weight else 1.0


def lead_by_choice(choices: Sequence[BatchChoice], learned: Collection[str]) -> float | None:
    """How many times as fast engines are where the best member drafts that has the learnt head, as they are without.

    Args:
        choices: As in `gain_by_choice`.
        learned: Likewise.

    Returns:
        Below 1.0 where another member, or plain decoding, is faster; None where not both have been tried.
    """
    found = [(choice.trials, lead) for choice in choices if (lead := _lead(choice, learned)) is not None]
    weight = sum(trials for trials, _ in found)
    return sum(trials * lead for trials, lead in found) / weight if weight else None


def chosen_share(choices: Sequence[BatchChoice], learned: Collection[str]) -> float:
    """Share of an engine's steps, as far as is known, that a head among the members `learned` drafts.

    Args:
        choices: As in `gain_by_choice`; without any there is but one drafter, which is the head.
        learned: Likewise.
    """
    if not choices:
        return 1.0
    weight = sum(choice.trials for choice in choices)
    return sum(choice.trials for choice in choices if choice.chosen in learned) / weight if weight else 0.0


def gain_by_beta(beta: float, before: float) -> float:
    """The same where a step costs what it did before anything was learnt: the ratio of the β, at least 1.0.

    It is so where a given head is learnt further, and on a GPU, where a step drafts with the head from the start.
    """
    return max(beta / before, 1.0) if before > 0 else 1.0


def expected_growth(curve: Sequence[Point], seconds: float) -> float | None:
    """How many times its last β a head is expected to have after it has learnt for so many more seconds.

    β grows about as the logarithm of the time; how steeply is what the last points say.

    Args:
        curve: In the order of time.
        seconds: At least 0.

    Returns:
        At least 1.0; None where the curve has fewer than two points.
    """
    if len(curve) < 2:
        return None
    some = curve[-_POINTS:]
    places = [math.log1p(point.seconds) for point in some]
    middle, mean = sum(places) / len(some), sum(point.beta for point in some) / len(some)
    spread = sum((place - middle) ** 2 for place in places)
    if not spread:
        return 1.0
    slope = sum((place - middle) * (point.beta - mean) for place, point in zip(places, some, strict=True)) / spread
    last = curve[-1]
    grown = max(slope, 0.0) * (math.log1p(last.seconds + seconds) - math.log1p(last.seconds))
    return 1.0 + grown / last.beta


def benefit(seconds_left: float, growth: float, lead: float = 1.0) -> float:
    """Seconds that decoding is shorter, of `seconds_left` at today's speed, if β becomes `growth` times what it is.

    Args:
        seconds_left: At today's speed.
        growth: At least 1.0.
        lead: `Balance.lead`. What others draft faster must be made up for before anything is gained.
    """
    faster = max(growth * lead, 1.0) / max(lead, 1.0)
    return max(seconds_left, 0.0) * (1.0 - 1.0 / max(faster, 1.0))


def _lead(choice: BatchChoice, learned: Collection[str]) -> float | None:
    """What `lead_by_choice` returns, at one batch size. A rate without the head is never below plain decoding's."""
    with_it = [one.drafted_rate for one in choice.members if one.name in learned]
    without = [one.rate for one in choice.members if one.name not in learned]
    return max(with_it) / max(without) if with_it and max(without, default=0.0) > 0 else None


def _average(before: float, now: float) -> float:
    return before + _PACE * (now - before) if before else now


# ---- Whether a learner works or rests: it must pay. A pure decision from the balance, the curve and what is left.

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

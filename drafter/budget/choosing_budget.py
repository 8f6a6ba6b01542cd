"""Chooses among several drafters, and how much the chosen one drafts.

Each member has an adaptive budget, which estimates its tokens per second. The best one drafts. The others are tried in
turns: first when the time so far makes what a trial may lose a small share of it, and again after pauses that are
longer the more a trial is expected to lose.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from drafter.budget.adaptive import HOPELESS, AdaptiveBudget, Band, Pause, steps_to_see
from drafter.budget.contract import StepLoad, StepObservation
from drafter.drafters.contract import Ask
from drafter.statistics import PLAIN, BatchChoice, MemberView, StepSums

_log = logging.getLogger(__name__)

_TRIAL_TREES = 48
"""Trees of a trial."""
_HOPELESS_TREES = 16
"""Trees after which a trial ends if its member is hopeless beside the leader."""
_LOSS = 0.01
"""Share of the time that may be lost in trials, all members together."""
_FIRST_LOSS = 0.04
"""Share of the time so far that first trials may have lost: short runs are not spent on finding out."""
_LONGEST_PAUSE = 8192
"""Most steps until a member is tried again."""
_BETTER = 1.02
"""A member must promise this many times the leader's rate to take its place."""


@dataclass
class _Choice:
    """The choice for steps of about the same number of rows."""

    members: list[Band]
    pauses: list[Pause]  # steps until each member is tried; failures are counted since it was last the best
    leader: int  # the member that drafts
    untried: set[int]  # members without a trial, and without estimates from other batch sizes
    trial: int | None = None  # the member on trial
    steps: int = 0  # drafted steps of this trial
    seconds: float = 0.0  # their time
    lost: float = 0.0  # seconds that ended trials took beyond the leader's for as many tokens
    trials: int = 0  # trials that have ended
    entered: bool = False
    # By member that was not chosen: the name of what was, and the member's relative speed at that time. Later estimates
    # could contradict the choice, as only the leader's are updated.
    compared: dict[int, tuple[str, float]] = field(default_factory=dict)
    sums: StepSums = field(default_factory=StepSums)


class ChoosingBudget:
    """Chooses the member and the number of draft tokens of each step; see `Budget`.

    Args:
        names: Of the members, in the order in which they are tried first.
        budgets: Of the members, over the same batch sizes.
        withheld: Members that must not draft before they are renewed; not all of them.
    """

    def __init__(self, names: Sequence[str], budgets: Sequence[AdaptiveBudget], withheld: Collection[int] = ()) -> None:
        self._names, self._budgets, self._withheld = tuple(names), tuple(budgets), set(withheld)
        allowed = [member for member in range(len(names)) if member not in self._withheld]
        self._choices = [
            _Choice(list(bands), [Pause() for _ in names], allowed[0], set(allowed))
            for bands in zip(*(budget.bands for budget in budgets), strict=True)
        ]

    def plan(self, load: StepLoad) -> Ask:
        choice = self._choice(load.rows)
        if not choice.entered:
            self._enter(choice, load)
        member = choice.leader if choice.trial is None else choice.trial
        return replace(self._budgets[member].plan(load), member=member)

    def observe(self, step: StepObservation) -> None:
        choice = self._choice(step.rows)
        drafted = choice.members[step.member]
        drafted.count(step, choice.sums)
        for member in [drafted] if step.asked else choice.members:  # a plain step shows all what plain decoding costs
            member.learn(step)
        if choice.trial is None:
            for pause in choice.pauses:
                pause.step()
        else:
            self._go_on_with_trial(choice, choice.trial, step)
        if choice.trial is None:
            self._begin_trial(choice, step.load)

    def renewed(self, member: int) -> None:
        self._budgets[member].renewed(0)
        for choice in self._choices:
            choice.pauses[member].forget()
            if member in self._withheld:
                choice.untried.add(member)
        self._withheld.discard(member)

    def choices(self) -> tuple[BatchChoice, ...]:
        return tuple(self._described(choice) for choice in self._choices if choice.sums.steps)

    def _described(self, choice: _Choice) -> BatchChoice:
        leader, sums = choice.members[choice.leader], replace(choice.sums)
        name = self._names[choice.leader]
        if not choice.trials and choice.untried:
            return BatchChoice(leader.rows, name, 0, (), None, sums)
        views = []
        for member, (member_name, band) in enumerate(zip(self._names, choice.members, strict=True)):
            if member not in self._withheld and member not in choice.untried:
                load = StepLoad(band.rows)
                compared = () if member == choice.leader else choice.compared.get(member, ())
                views.append(MemberView(member_name, *band.best(load), band.drafted_rate(load), *compared))
        return BatchChoice(leader.rows, name, choice.trials, tuple(views), leader.verdict, sums)

    def _compare(self, choice: _Choice, member: int, load: StepLoad) -> None:
        rate, nodes = choice.members[choice.leader].best(load)
        chosen = self._names[choice.leader] if nodes else PLAIN
        choice.compared[member] = chosen, choice.members[member].drafted_rate(load) / rate

    def _enter(self, choice: _Choice, load: StepLoad) -> None:
        """Begin with estimates from other batch sizes, as if their members had had a trial at this one."""
        choice.entered = True
        known = [member for member, budget in enumerate(self._budgets) if budget.enter(load)]
        if known:
            choice.leader = max(known, key=lambda member: choice.members[member].best(load)[0])
        best = choice.members[choice.leader].best(load)[0]
        enough = steps_to_see(_TRIAL_TREES, load.rows)
        for member in known:
            choice.untried.discard(member)
            if member != choice.leader:
                self._compare(choice, member, load)
            self._pause(choice, member, load, enough * choice.members[member].expected_loss(load, best))
        self._begin_trial(choice, load)

    def _begin_trial(self, choice: _Choice, load: StepLoad) -> None:
        """Begin the next trial, if one is due: the leader's comes first, where it has had none."""
        if choice.leader in choice.untried:
            choice.trial = choice.leader
        elif choice.untried:
            member = min(choice.untried)
            lost = choice.lost + self._loss_at_worst(choice, member, load)
            choice.trial = member if lost < _FIRST_LOSS * choice.sums.seconds else None
        else:
            others = (one for one in range(len(self._names)) if one != choice.leader and one not in self._withheld)
            choice.trial = next((member for member in others if not choice.pauses[member].left), None)
        if choice.trial is not None:
            choice.steps, choice.seconds = 0, 0.0
            choice.members[choice.trial].look_again()

    def _loss_at_worst(self, choice: _Choice, member: int, load: StepLoad) -> float:
        """Return the seconds that a trial of a member loses which is never right."""
        tried = choice.members[member]
        step_seconds = tried.step_seconds(load, tried.plan(load).nodes)
        useful = 1 / choice.members[choice.leader].best(load)[0]
        return steps_to_see(_HOPELESS_TREES, load.rows) * max(step_seconds - useful, 0.0)

    def _go_on_with_trial(self, choice: _Choice, member: int, step: StepObservation) -> None:
        tried = choice.members[member]
        if step.asked and step.member == member:
            choice.steps += 1
            choice.seconds += tried.step_seconds(step.load, step.asked)
        ended = choice.steps >= steps_to_see(_TRIAL_TREES, step.rows) or tried.pause.left
        if ended or self._hopeless(choice, member, step):
            self._end_trial(choice, member, step.load)

    def _hopeless(self, choice: _Choice, member: int, step: StepObservation) -> bool:
        """Return whether the member on trial is already seen to be much slower than the leader."""
        if member == choice.leader or choice.steps * step.rows < _HOPELESS_TREES:
            return False
        rate = choice.members[choice.leader].best(step.load)[0]
        return choice.members[member].drafted_rate(step.load) < HOPELESS * rate

    def _end_trial(self, choice: _Choice, member: int, load: StepLoad) -> None:
        """Let the better of the member and the leader lead, and pause the other."""
        rates = [one.best(load)[0] for one in choice.members]
        choice.trials += 1
        settles = choice.untried == {member}
        choice.untried.discard(member)
        loser = member
        if member != choice.leader and rates[member] > _BETTER * rates[choice.leader]:
            choice.leader, loser = member, choice.leader
            choice.pauses[member].failures = 0
        if loser != choice.leader:
            self._compare(choice, loser, load)
        if settles or (loser != member and not choice.untried):
            self._tell(choice, load.rows)
        # What a trial of the loser loses, relative to the steps that the leader would make in the same time.
        share = 1 - choice.members[member].drafted_rate(load) / rates[choice.leader] if loser == member else 0.0
        lost = max(share, 0.0) * choice.seconds
        choice.lost += lost if member != choice.leader else 0.0
        self._pause(choice, loser, load, lost)
        choice.trial = None

    def _pause(self, choice: _Choice, member: int, load: StepLoad, lost: float) -> None:
        """Do not try a member until `lost` seconds are a small share of the time, though all others have trials too."""
        leader = choice.members[choice.leader]
        step_seconds = leader.step_seconds(load, leader.plan(load).nodes)
        others = max(len(self._names) - 1, 1)
        steps = max(math.ceil(lost * others / (_LOSS * step_seconds)), 4 * steps_to_see(_TRIAL_TREES, load.rows))
        choice.pauses[member].begin(steps, _LONGEST_PAUSE)

    def _tell(self, choice: _Choice, rows: int) -> None:
        listed = ", ".join(
            f"{self._names[member]} is {share:.2f} times as fast as {chosen}"
            for member, (chosen, share) in choice.compared.items()
            if member != choice.leader
        )
        _log.info("%s drafts for about %d rows (%s)", self._names[choice.leader], rows, listed)

    def _choice(self, rows: int) -> _Choice:
        return self._choices[self._budgets[0].place(rows)]

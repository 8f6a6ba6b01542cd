"""A budget for a drafter that is several: which of them drafts, and how much.

Each member has an adaptive budget of its own, which says what it brings: tokens per second at its best number of nodes,
plain decoding included. The best one drafts. The others are tried in turns, and the more a trial is expected to lose,
the longer it is until the next one: trials cost a few percent at most, whatever the members are worth.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from drafter.budget.adaptive import HOPELESS, AdaptiveBudget, Pause, steps_to_see
from drafter.budget.contract import StepLoad, StepObservation
from drafter.drafters.contract import Ask
from drafter.statistics import PLAIN, BatchChoice, MemberView, StepSums

_log = logging.getLogger(__name__)

_TRIAL_TREES = 48
"""A trial has as many drafted steps as it takes to see so many trees."""
_HOPELESS_TREES = 16
"""A trial ends after so many trees, if its member is hopeless beside the leader."""
_LOSS = 0.01
"""Share of the time that may be lost in trials, all members together."""
_LONGEST_PAUSE = 8192
"""Steps until a member is tried again at most."""
_BETTER = 1.02
"""A member must promise so many times the rate of the one that drafts to take its place."""


@dataclass
class _Band:
    """The choice for steps of about the same number of rows.

    Args:
        pauses: Steps until each member is tried; failures are counted since it was last the best.
        leader: The member that drafts.
        trial: The member that is tried now; None if none is.
        steps: Drafted steps of this trial.
        seconds: Their time.
        trials: Trials that have ended.
        untried: Members without a trial so far, of which it is not known from other batch sizes what comes of one.
        entered: Whether there has been a step.
        compared: Of each member that was not chosen: what was, when the two were last compared, and by how much it was
            as fast as that.
        sums: All steps.
    """

    pauses: list[Pause]
    leader: int = 0
    trial: int | None = None
    steps: int = 0
    seconds: float = 0.0
    trials: int = 0
    untried: set[int] = field(default_factory=set)
    entered: bool = False
    compared: dict[int, tuple[str, float]] = field(default_factory=dict)
    sums: StepSums = field(default_factory=StepSums)


class ChoosingBudget:
    """Chooses the member and the nodes of each step; verifies all that is drafted.

    Args:
        names: Of the members, in the order in which they are tried first.
        budgets: Of the members, over the same batch sizes.
        withheld: Members that are not to draft before they are renewed; not all of them.
    """

    def __init__(self, names: Sequence[str], budgets: Sequence[AdaptiveBudget], withheld: Collection[int] = ()) -> None:
        self._names, self._budgets, self._withheld = tuple(names), tuple(budgets), set(withheld)
        members = len(self._names)
        allowed = [member for member in range(members) if member not in self._withheld]
        self._bands = [
            _Band([Pause() for _ in self._names], leader=allowed[0], untried=set(allowed))
            for _ in self._budgets[0].table.batches
        ]

    def plan(self, load: StepLoad) -> Ask:
        """Choose the drafter and the number of draft nodes of a step."""
        band = self._band(load.rows)
        if not band.entered:
            self._enter(band, load)
        member = band.leader if band.trial is None else band.trial
        return replace(self._budgets[member].plan(load), member=member)

    def observe(self, step: StepObservation) -> None:
        """Learn what the member that drafted is worth, and who drafts next; see `Budget.observe`."""
        band = self._band(step.rows)
        self._budgets[step.member].count(step, band.sums)
        if step.asked:
            self._budgets[step.member].learn(step)
        else:  # a plain step says to all what plain decoding costs
            for budget in self._budgets:
                budget.learn(step)
        if band.trial is None:
            for pause in band.pauses:
                pause.step()
        else:
            self._go_on_with_trial(band, step)
        if band.trial is None:
            self._begin_trial(band, step.rows)

    def renewed(self, member: int) -> None:
        """Try a member soon, or for the first time if it was withheld; see `Budget.renewed`."""
        self._budgets[member].renewed(0)
        for band in self._bands:
            band.pauses[member].forget()
            if member in self._withheld:
                band.untried.add(member)
        self._withheld.discard(member)

    def choices(self) -> tuple[BatchChoice, ...]:
        """Return who drafts at each batch size that has been seen, and why; see `Budget.choices`."""
        sizes = zip(map(int, self._budgets[0].table.batches), self._bands, strict=True)
        return tuple(self._choice(rows, band) for rows, band in sizes if band.sums.steps)

    def _choice(self, rows: int, band: _Band) -> BatchChoice:
        """The choice at a batch size. Before there is one, it has no views and no verdict."""
        name, sums = self._names[band.leader], replace(band.sums)
        if not band.trials and band.untried:
            return BatchChoice(rows, name, 0, (), None, sums)
        views = tuple(
            self._view(band, member, StepLoad(rows))
            for member in range(len(self._names))
            if member not in self._withheld and member not in band.untried
        )
        return BatchChoice(rows, name, band.trials, views, self._budgets[band.leader].verdict(rows), sums)

    def _view(self, band: _Band, member: int, load: StepLoad) -> MemberView:
        budget = self._budgets[member]
        compared = () if member == band.leader else band.compared.get(member, ())
        return MemberView(self._names[member], *budget.best(load), budget.drafted_rate(load), *compared)

    def _compare(self, band: _Band, member: int, load: StepLoad) -> None:
        """Note how fast a member is beside what was chosen in its place, by what is believed of both now.

        What is believed of the one that drafts changes with each step, and of the other no more: put beside one another
        later, the two could say the opposite of what was chosen.
        """
        rate, nodes = self._budgets[band.leader].best(load)
        chosen = self._names[band.leader] if nodes else PLAIN
        band.compared[member] = chosen, self._budgets[member].drafted_rate(load) / rate

    def _enter(self, band: _Band, load: StepLoad) -> None:
        """Begin with what other batch sizes have told of the members, as if these had had a trial at this one."""
        band.entered = True
        known = [member for member, budget in enumerate(self._budgets) if budget.enter(load)]
        if known:
            band.leader = max(known, key=lambda member: self._budgets[member].best(load)[0])
        best = self._budgets[band.leader].best(load)[0]
        enough = steps_to_see(_TRIAL_TREES, load.rows)
        for member in known:
            band.untried.discard(member)
            if member != band.leader:
                self._compare(band, member, load)
            self._pause(band, member, load, enough * self._budgets[member].expected_loss(load, best))
        self._begin_trial(band, load.rows)

    def _go_on_with_trial(self, band: _Band, step: StepObservation) -> None:
        member = band.trial
        assert member is not None
        budget = self._budgets[member]
        if step.asked and step.member == member:
            band.steps += 1
            band.seconds += budget.seconds(step.load, step.asked)
        enough = steps_to_see(_TRIAL_TREES, step.rows)
        if band.steps < enough and budget.drafts(step.rows) and not self._hopeless(band, step):
            return
        rates = [one.best(step.load)[0] for one in self._budgets]
        band.trials += 1
        settles = band.untried == {member}
        band.untried.discard(member)
        loser = member
        if member != band.leader and rates[member] > _BETTER * rates[band.leader]:
            band.leader, loser = member, band.leader
            band.pauses[member].failures = 0
        if loser != band.leader:
            self._compare(band, loser, step.load)
        if settles or (loser != member and not band.untried):
            self._tell(band, step.rows)
        # What a trial of the loser loses, relative to the steps that the leader would make in the same time.
        share = 1 - budget.drafted_rate(step.load) / rates[band.leader] if loser == member else 0.0
        lost = max(share, 0.0) * band.seconds
        self._pause(band, loser, step.load, lost)
        band.trial = None

    def _pause(self, band: _Band, member: int, load: StepLoad, lost: float) -> None:
        """Do not try a member until `lost` seconds are a small share of the time, though all others have trials too."""
        leader = self._budgets[band.leader]
        step_seconds = leader.seconds(load, leader.plan(load).nodes)
        others = max(len(self._budgets) - 1, 1)
        steps = max(math.ceil(lost * others / (_LOSS * step_seconds)), 4 * steps_to_see(_TRIAL_TREES, load.rows))
        band.pauses[member].begin(steps, _LONGEST_PAUSE)

    def _hopeless(self, band: _Band, step: StepObservation) -> bool:
        """True if the member on trial is already seen to be much slower than the one that drafts."""
        if band.trial is None or band.trial == band.leader or band.steps * step.rows < _HOPELESS_TREES:
            return False
        rate = self._budgets[band.leader].best(step.load)[0]
        return self._budgets[band.trial].drafted_rate(step.load) < HOPELESS * rate

    def _tell(self, band: _Band, rows: int) -> None:
        others = {self._names[member]: found for member, found in band.compared.items() if member != band.leader}
        listed = ", ".join(
            f"{name} is {share:.2f} times as fast as {chosen}" for name, (chosen, share) in others.items()
        )
        _log.info("%s drafts for about %d rows (%s)", self._names[band.leader], rows, listed)

    def _begin_trial(self, band: _Band, rows: int) -> None:
        """Begin the next trial, if one is due: the leader's comes first, where it has had none."""
        untried = band.leader if band.leader in band.untried else min(band.untried, default=None)
        due = [
            member
            for member, pause in enumerate(band.pauses)
            if not pause.left and member != band.leader and member not in self._withheld
        ]
        if untried is None and not due:
            return
        band.trial = due[0] if untried is None else untried
        band.steps, band.seconds = 0, 0.0
        self._budgets[band.trial].look_again(rows)

    def _band(self, rows: int) -> _Band:
        return self._bands[self._budgets[0].band_of(rows)]

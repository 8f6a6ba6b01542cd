"""Chooses each step's drafter and number of draft tokens: those that give most tokens per second.

A step in which member m of the drafter drafts k tokens per row emits `tokens[m, k]` per row and takes `seconds[m, k]`.
The largest ratio wins; k = 0 is plain decoding. What trees are worth is learnt from every tree that is verified. Of
members that do not draft it is learnt from shadow drafts, which are not verified but compared with the text that
follows: output never depends on the drafter, so this tells what verification would have told. Where a verified draft
is expected to lose less than a shadow draft takes, it is verified. Both are charged to an allowance, a small share of
the time so far. It is spent on the member that may bring most: by the upper end of what its trees were worth, which
rises again while none is scored. `python -m benchmarks.budget_constants` measures what each constant below does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drafter.budget.contract import Floats, StepObservation
from drafter.budget.latency_table import Latencies, LatencyTable
from drafter.budget.worth import Worth
from drafter.drafters.contract import Ask, MeasuredWorth
from drafter.statistics import PLAIN, BatchChoice, MemberView, StepSums, Verdict

_PACE = 0.03
"""EMA weight of the newest step in latencies. Low, because the machine does other work."""
_TRUST, _LITTLE_TRUST = 8, 1
"""The latencies of a table that is sure count for so many steps, and those of another one; those of drafting, which
depend on the text, for one."""
_MOST = 4.0
"""A step's time ÷ its expected latency is clamped to this, either way: the process may have been stopped."""
_FIRST_RUN, _NEXT_RUN = 64, 1024
"""Drafted steps before the first run of plain ones, and between two, which measure a plain step while drafting pays."""
_EARLY_RUN = 4
"""The same before the first run, and its plain steps, where the table is not sure."""
_RUN = 8
"""Plain steps of a run."""
_RUN_PACE = 0.12
"""EMA weight of their steps, of which there are few."""
_SURPRISE = 0.05
"""Change of a plain step's latency by a run after which the next run comes soon."""
_SHARE = 0.006
"""Share of the time that exploring may lose, all members together."""
_FIRST = 0.75
"""Plain steps that exploring may lose beyond that share: a run's first steps decide much."""
_DOUBT = 0.2
"""Share of a drafted step's promised rate that counts for nothing before any such step has been taken: until a gain is
shown, drafting is exploring."""
_WIDER = 16
"""One step in so many asks for more draft tokens: smaller trees do not show what larger ones would bring."""
_HOLDS = 16
"""Steps for which a plan holds; fewer until there have been many."""


@dataclass(frozen=True)
class Plan:
    """The choice for so many rows: what to ask for, and what to explore."""

    rows: int
    ask: Ask  # of what is fastest
    wider: Ask  # the same with the next larger number of draft tokens
    rate: float  # its tokens per second and row
    explore: Ask | None = None  # None where no other member can be faster
    price: float = 0.0  # seconds that exploring is expected to lose


@dataclass
class Band:
    """Steps of about `rows` rows: how their latencies differ from the table's, and what was chosen."""

    rows: int
    slower: Floats  # `[M]` time of a step without its drafting ÷ the table's
    slower_drafting: Floats  # `[members]` time of drafting ÷ the table's
    told: npt.NDArray[np.int64]  # `[M]` timed steps of each number of draft tokens
    told_drafting: npt.NDArray[np.int64]  # `[members]` timed drafts
    until_run: int = _FIRST_RUN  # drafted steps before the next run of plain ones
    run: int = 0  # plain steps left of such a run
    before_run: float = 1.0  # `slower[0]` before it
    explored: int = 0  # steps that explored
    plan: Plan | None = None
    age: int = 0  # steps since the plan was made
    sums: StepSums = field(default_factory=StepSums)

    def correct(self, size: int, taken: float, expected: float, trust: int, weight: float = 1.0) -> None:
        """Learn from the time of a step, without its drafting, that had the `size`-th number of draft tokens."""
        self.told[size] += 1
        pace = max(_RUN_PACE if self.run else _PACE, 1 / (trust + self.told[size]))
        self.slower[size] *= _correction(taken, expected, weight * pace)
        if not self.told.all():  # of the other numbers nothing is known but that they lie between these, or beyond
            sizes = np.arange(len(self.told))
            self.slower = np.interp(sizes, sizes[self.told > 0], self.slower[self.told > 0])

    def correct_drafting(self, member: int, taken: float, by_table: float) -> None:
        if not by_table:
            return
        self.told_drafting[member] += 1
        pace = max(_PACE, 1 / (1 + self.told_drafting[member]))
        self.slower_drafting[member] *= _correction(taken, self.slower_drafting[member] * by_table, pace)


def _correction(taken: float, expected: float, pace: float) -> float:
    """Return the factor on an estimated latency, by an EMA of weight `pace`."""
    return float(1 + pace * (min(max(taken / expected, 1 / _MOST), _MOST) - 1))


class AdaptiveBudget:
    """Chooses by the latencies of this machine and by what trees have been worth; see `Budget`.

    Args:
        table: Latencies of steps.
        names: Of the drafter's members; one for a single drafter.
        withheld: Members that must not draft before they are renewed.
        known: What trees of each member were worth on held-out text; None where nothing was measured.
        shadows: Drafts need not be verified to be scored: the verifier is lossless, and the host follows each step.
    """

    def __init__(
        self,
        table: LatencyTable,
        names: Sequence[str] = ("",),
        *,
        withheld: Collection[int] = (),
        known: Sequence[MeasuredWorth | None] = (),
        shadows: bool = False,
    ) -> None:
        self.table, self._names, self._withheld, self._shadows = table, tuple(names), set(withheld), shadows
        self._nodes = np.array(table.nodes)
        self._size_of = {nodes: size for size, nodes in enumerate(table.nodes)}
        self._worth = [Worth(self._nodes) for _ in names]
        for worth, measured in zip(self._worth, known, strict=False):
            if measured is not None:
                worth.believe(measured)
        sizes, members = len(self._nodes), len(names)
        self.bands = [
            Band(int(rows), np.ones(sizes), np.ones(members), np.zeros(sizes, np.int64), np.zeros(members, np.int64))
            for rows in table.batches
        ]
        if not table.sure:
            for band in self.bands:
                band.until_run = _EARLY_RUN
        self._seconds = 0.0  # of all steps
        self._lost = 0.0  # of them, by exploring
        self._steps = 0
        self._seen = [0] * len(names)  # `_steps` when each member's trees were last scored
        self._band_of: dict[int, Band] = {}
        self._latencies_of: dict[int, Latencies] = {}
        self._trust = _TRUST if table.sure else _LITTLE_TRUST

    def plan(self, rows: int) -> Ask:
        band = self._band(rows)
        if band.run:
            return Ask(0)
        plan = self._planned(band, rows)
        if plan.ask.nodes and band.sums.steps % _WIDER == _WIDER - 1:
            return plan.wider
        if plan.explore is None or plan.price > self._allowance(band, rows):
            return plan.ask
        return plan.explore

    def observe(self, step: StepObservation) -> None:
        band = self._band(step.rows)
        planned = self._planned(band, step.rows)
        seconds = self._learn_drafted(band, step) if step.ask.nodes else self._learn_plain(band, step)
        explores = bool(step.ask.nodes) and (not planned.ask.nodes or step.ask.member != planned.ask.member)
        if explores:
            self._explore(band, seconds - step.tokens / step.rows / planned.rate)
        if step.ask.shadow is not None and step.shadow is not None:
            seconds += step.shadow.all
            self._explore(band, step.shadow.all)
            by_table = self._latencies(step.rows).shadow[step.ask.shadow.member]
            expected = float(by_table[self._size_of[step.ask.shadow.nodes]])
            band.correct_drafting(step.ask.shadow.member, step.shadow.drafting, expected)
        self._count(band, step, seconds)
        self._seconds += seconds
        self._steps += 1
        for trees in step.shadows if step.trees is None else (step.trees, *step.shadows):
            self._worth[trees.member].learn(trees)
            self._seen[trees.member] = self._steps
        band.age += 1
        # At first each step tells much.
        if explores or step.shadows or band.age >= min(1 + band.sums.steps // _HOLDS, _HOLDS):
            band.plan = None

    def renewed(self, member: int) -> None:
        self._withheld.discard(member)
        self._worth[member].forget()
        for band in self.bands:
            band.plan = None

    def choices(self) -> tuple[BatchChoice, ...]:
        return tuple(self._described(band) for band in self.bands if band.sums.steps)

    # ---- tokens and seconds

    def _band(self, rows: int) -> Band:
        """Return the measured batch size that is closest to `rows`, in ratio."""
        if rows not in self._band_of:
            self._band_of[rows] = self.bands[int(np.abs(np.log(self.table.batches / rows)).argmin())]
        return self._band_of[rows]

    def _latencies(self, rows: int) -> Latencies:
        if rows not in self._latencies_of:
            self._latencies_of[rows] = self.table.at(rows)
        return self._latencies_of[rows]

    def _seconds_of(self, size: int, band: Band, rows: int) -> float:
        """Seconds of a step with the `size`-th number of draft tokens, without drafting; 0 is a plain one."""
        return float(band.slower[size] * self._latencies(rows).verify[size])

    def _verifying(self, band: Band, rows: int, drafted: Floats) -> Floats:
        """Seconds `[..., M]` of steps without drafting, of trees of `drafted` `[..., M]` tokens, not always all."""
        full = band.slower * self._latencies(rows).verify
        filled = drafted / np.maximum(self._nodes, 1)
        verifying: Floats = full[:1] + filled * (full - full[:1])
        return verifying

    def _estimates(self, band: Band, rows: int) -> tuple[Floats, Floats]:
        """Tokens `[members, M]` per row, and seconds `[members, M]`, to expect of steps."""
        tokens = np.stack([1.0 + worth.gain for worth in self._worth])  # the bonus token included
        drafted = np.stack([worth.drafted for worth in self._worth])
        drafting = band.slower_drafting[:, None] * self._latencies(rows).draft
        return tokens, self._verifying(band, rows, drafted) + drafting

    # ---- the choice

    def _planned(self, band: Band, rows: int) -> Plan:
        if band.plan is None or band.plan.rows != rows:
            band.plan, band.age = self._make_plan(band, rows), 0
        return band.plan

    def _make_plan(self, band: Band, rows: int) -> Plan:
        tokens, seconds = self._estimates(band, rows)
        rates = tokens / seconds
        best = 1 + rates[:, 1:].argmax(1)
        ask, rate = Ask(0), float(rates[0, 0])
        wider = ask
        if known := self._known():
            member = max(known, key=lambda one: float(rates[one, best[one]]))
            size = int(best[member])
            if rates[member, size] * (1 - _DOUBT / (1 + band.told[1:].sum())) > rate:
                ask, rate = self._ask(member, size), float(rates[member, size])
                wider = self._ask(member, min(size + 1, len(self._nodes) - 1))
        return self._with_exploring(Plan(rows, ask, wider, rate), band, tokens, seconds, best)

    def _with_exploring(
        self, plan: Plan, band: Band, tokens: Floats, seconds: Floats, best: npt.NDArray[np.int64]
    ) -> Plan:
        """Add what to explore: a member that does not draft, with its `best` `[members]` number of draft tokens.

        With so many rows that even much accepted would not pay, that is none.
        """
        may_bring = [worth.may_bring(self._steps - seen) for worth, seen in zip(self._worth, self._seen, strict=True)]
        at_best = np.arange(len(best)), best
        promised = ((1 + np.stack(may_bring)) / seconds)[at_best]
        can_pay = ((1 + np.stack([worth.much for worth in self._worth])) / seconds)[:, 1:].max(1) > plan.rate
        promised[[not worth.is_known for worth in self._worth]] = np.inf  # they come first, in order
        promised[~can_pay] = 0.0
        others = [
            member
            for member in range(len(self._names))
            if member not in self._withheld
            and promised[member] > plan.rate
            and not (plan.ask.nodes and member == plan.ask.member)
        ]
        if not others:
            return plan
        lost = (seconds - tokens / plan.rate)[at_best].clip(0)
        drafting = band.slower_drafting * self._latencies(plan.rows).shadow[at_best]
        prices = np.minimum(lost, drafting) if self._shadows else lost
        allowance = self._allowance(band, plan.rows)
        member = max(others, key=lambda one: (bool(prices[one] <= allowance), float(promised[one])))
        explored = self._ask(member, int(best[member]))
        if prices[member] < lost[member]:
            explored = replace(plan.ask, shadow=explored)
        return replace(plan, explore=explored, price=float(prices[member]))

    def _allowance(self, band: Band, rows: int) -> float:
        """Return the seconds that exploring may still lose."""
        return _FIRST * self._seconds_of(0, band, rows) + _SHARE * self._seconds - self._lost

    def _known(self) -> list[int]:
        """Members that may draft, with evidence of what their trees are worth."""
        return [member for member, worth in enumerate(self._worth) if member not in self._withheld and worth.is_known]

    def _ask(self, member: int, size: int) -> Ask:
        nodes = int(self._nodes[size])
        return Ask(nodes, 1 / (nodes + 1), member)

    # ---- learning

    def _learn_plain(self, band: Band, step: StepObservation) -> float:
        """Learn from a plain step, with little work: a small model makes thousands a second. Return its seconds."""
        expected = self._seconds_of(0, band, step.rows)
        if step.seconds is None:
            return expected
        band.correct(0, step.seconds.rest, expected, self._trust)
        if band.run:
            band.run -= 1
            if not band.run:
                surprise = abs(float(band.slower[0]) / band.before_run - 1) > _SURPRISE
                band.until_run = _FIRST_RUN if surprise else _NEXT_RUN
        return step.seconds.all

    def _learn_drafted(self, band: Band, step: StepObservation) -> float:
        """Learn what a drafted step takes; return its seconds."""
        member, nodes, trees = step.ask.member, step.ask.nodes, step.trees
        assert trees is not None
        size = self._size_of[nodes]
        filled = int(trees.drafted.sum()) / (step.rows * nodes)
        # As `_verifying`, of one number of draft tokens: this comes after every step.
        plain, full = (self._seconds_of(one, band, step.rows) for one in (0, size))
        rest = plain + filled * (full - plain)
        drafting = float(self._latencies(step.rows).draft[member, size])
        if step.seconds is None:
            band.told[size] += 1
            return rest + float(band.slower_drafting[member]) * drafting
        band.until_run -= 1
        if not band.until_run:
            early = not self.table.sure and not band.told[0]
            band.run, band.before_run = _EARLY_RUN if early else _RUN, float(band.slower[0])
        band.correct(size, step.seconds.rest, rest, self._trust, filled)
        band.correct_drafting(member, step.seconds.drafting, drafting)
        return step.seconds.all

    def _explore(self, band: Band, lost: float) -> None:
        self._lost += lost
        band.explored += 1

    def _count(self, band: Band, step: StepObservation, seconds: float) -> None:
        """Add a step to the sums, with plain decoding's estimated time for as many tokens."""
        plain = self._seconds_of(0, band, step.rows)
        if step.trees is None and step.seconds is not None:
            plain = step.seconds.rest
        else:
            plain *= step.tokens / step.rows
        if step.trees is None:  # what is beyond a token for each row was forced: drafted, whatever was asked for
            speculated = min(max(step.tokens - step.rows, 0), step.rows)
        else:
            speculated = int(np.count_nonzero(step.trees.drafted))
        is_plain = step.trees is None and not speculated
        band.sums.add(step.rows, speculated, seconds, plain, timed=step.seconds is not None, plain=is_plain)

    # ---- for people

    def _described(self, band: Band) -> BatchChoice:
        tokens, seconds = self._estimates(band, band.rows)
        rates = tokens / seconds
        fastest, best, plain = rates[:, 1:].max(1), 1 + rates[:, 1:].argmax(1), float(rates[0, 0])
        known = self._known()
        if not known:
            return BatchChoice(band.rows, "", band.explored, (), None, replace(band.sums))
        leader = max(known, key=lambda member: float(fastest[member]))
        size = int(best[leader])
        nodes = int(self._nodes[size])
        cost, gain = float(seconds[leader, size] * plain - 1), float(tokens[leader, size] - 1)
        verdict = Verdict(nodes, cost / nodes, gain / nodes)
        beside = self._names[leader] if verdict.drafts else PLAIN
        highest = max(float(fastest[leader]), plain)
        views = []
        for member in known if len(self._names) > 1 else ():
            compared = () if member == leader else (beside, float(fastest[member]) / highest)
            views.append(MemberView(self._names[member], *compared))
        return BatchChoice(band.rows, self._names[leader], band.explored, tuple(views), verdict, replace(band.sums))

"""Adapts the number of draft tokens to what pays, and retries with exponential back-off where drafting does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from drafter.budget.contract import Floats, StepLoad, StepObservation, StepSeconds
from drafter.budget.latency_table import LatencyTable, StepCosts
from drafter.drafters.contract import Ask
from drafter.statistics import BatchChoice, StepSums, Verdict

_MOST_DOUBLINGS = 2
"""So many times the pause doubles."""


@dataclass
class Pause:
    """The steps until something is tried again.

    Args:
        left: How many are left.
        failures: Pauses that count towards the length of the next one.
    """

    left: int = 0
    failures: int = 0

    def begin(self, steps: int, longest: int) -> None:
        """Begin a pause of so many steps after a first failure; more after others, but at most `longest`."""
        self.left = min(steps << self.failures, longest)
        self.failures = min(self.failures + 1, _MOST_DOUBLINGS)

    def step(self) -> None:
        """Make one of the steps."""
        self.left = max(self.left - 1, 0)

    def forget(self) -> None:
        """Let there be no pause, nor a longer one next time."""
        self.left = self.failures = 0


# The adaptive budget: as many draft nodes as give the most tokens per second, or none.

_PACE = 0.03
"""Weight of the newest step in the averages. One row accepts now none of a tree and now all of it."""
_TRIED_TREES = 8
"""Drafting may be given up once so many trees were seen. What was believed before them counts for as many."""
_FEWEST_STEPS = 2
"""Drafted steps that say something, however many trees each of them has."""
HOPELESS = 0.8
"""Drafting that promises less than this share of another rate is hardly worth a try."""
_FIRST_RUN, _NEXT_RUN = 64, 1024
"""Drafted steps before the first run of plain ones, and between two of them: while drafting pays, nothing else would
tell what a plain step takes, and something else may have slowed the machine when that was measured."""
_RUN = 8
"""Plain steps of a run."""
_COLD = 2
"""First plain steps after drafted ones: they find little of the base in a processor's caches, and say nothing."""
_TRUST = 8
"""Plain steps for which what was measured at start counts."""
_MOST = 2.0
"""Largest ratio of a step's time to its expected latency, either way, that counts: something else may have stopped the
process."""
_LOOKS = 0.015
"""Share of the time that may be lost by trying drafting again where it did not pay."""
_LONGEST_PAUSE = 4096
"""Plain steps until drafting is tried again at most."""


def steps_to_see(trees: int, rows: int) -> int:
    """Drafted steps of `rows` rows after which so many trees were seen, and no fewer than say something."""
    return max(math.ceil(trees / rows), _FEWEST_STEPS)


@dataclass
class _Band:
    """Estimates for steps of about the same number of rows.

    Args:
        gain: `[M]` accepted tokens a row that the drafter promises of each number of nodes.
        costs: Of steps of the measured batch size.
        slower: `[M]` time of a step of each number of nodes ÷ its latency by the table.
        promised: EMA of the accepted tokens a row that recent trees promised; 0 before the first one.
        came_true: EMA of the accepted tokens that they brought.
        seen: Drafted steps since the start or the last pause, in which the text has gone on.
        lost: Seconds that those of these before drafting could be given up took beyond what plain decoding takes for as
            many tokens.
        pause: Plain steps before drafting is tried again.
        entered: Whether there have been such steps.
        until_run: Drafted steps before the next run of plain ones.
        run: Plain steps that are left of such a run.
        plain: Plain steps since the last drafted one.
        told: Plain steps that have told what they take.
        verdict: Whether drafting pays, as it was last decided.
        sums: All steps.
    """

    gain: Floats
    costs: StepCosts
    slower: Floats
    promised: float = 0.0
    came_true: float = 0.0
    seen: int = 0
    lost: float = 0.0
    pause: Pause = field(default_factory=Pause)
    entered: bool = False
    until_run: int = _FIRST_RUN
    run: int = 0
    plain: int = 0
    told: int = 0
    verdict: Verdict | None = None
    sums: StepSums = field(default_factory=StepSums)

    @property
    def truth(self) -> float:
        """Share of what is promised that comes true. A tree that promises nothing says nothing about it."""
        return self.came_true / self.promised if self.promised else 1.0

    def look_again(self) -> None:
        """End the pause, if there is one."""
        self.pause.left = self.seen = 0
        self.lost = 0.0


class AdaptiveBudget:
    """Chooses the nodes of each step; verifies all that is drafted.

    Args:
        table: Latencies of this machine.

    Attributes:
        table: As given; what is learnt since is elsewhere.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._batches, self._nodes = table.batches, np.array(table.nodes)
        self._band_of: dict[int, int] = {}
        # Accepted tokens grow about as the logarithm of the nodes. How steeply is learnt from the first tree.
        self._growth = np.log1p(self._nodes)
        ones = np.ones(len(self._nodes))
        self._bands = [_Band(self._growth / 2, table.costs(int(batch)), ones.copy()) for batch in table.batches]

    def enter(self, load: StepLoad) -> bool:
        """Begin with what is known of other batch sizes, if there is a first step of this one.

        What nodes are worth follows from drafter and text, and only what they cost from the batch size.

        Returns:
            Whether it is, and something is known.
        """
        place = self.band_of(load.rows)
        band = self._bands[place]
        if band.entered:
            return False
        band.entered = True
        known = [other for other in range(len(self._bands)) if self._bands[other].promised]
        if not known:
            return False
        nearest = self._bands[min(known, key=lambda other: abs(other - place))]
        band.gain = nearest.gain.copy()
        band.promised, band.came_true = nearest.promised, nearest.came_true
        band.verdict = self._verdict(band, load)
        plain = float(self._rates(band, load)[0])
        if self.drafted_rate(load) < HOPELESS * plain:
            self._pause(band, load, steps_to_see(_TRIED_TREES, load.rows) * self.expected_loss(load, plain))
        return True

    def plan(self, load: StepLoad) -> Ask:
        """Ask for the best number of draft nodes above 0; for none during pauses and runs of plain steps."""
        self.enter(load)
        band = self._band(load.rows)
        if band.pause.left or band.run:
            return Ask(0)
        nodes = int(self._nodes[1 + self._rates(band, load)[1:].argmax()])
        return Ask(nodes, 1 / (nodes + 1))

    def observe(self, step: StepObservation) -> None:
        """Learn what nodes are worth and what they cost, and count the step; see `Budget.observe`."""
        self.count(step, self._band(step.rows).sums)
        self.learn(step)

    def learn(self, step: StepObservation) -> None:
        """Learn what nodes are worth and what they cost."""
        band = self._band(step.rows)
        if not step.asked:
            self._observe_plain(band, step)
            return
        self._count_drafted(band, step.seconds is not None)
        size = int(self._nodes.searchsorted(step.asked))
        expected = self._seconds(band, step.load)
        if step.seconds is not None:
            correction = _correction(step.seconds, float(expected[size]), _PACE)
            band.slower[size] *= correction
            expected[size] *= correction
        band.seen += 1
        tries = steps_to_see(_TRIED_TREES, step.rows)
        accepted = float(step.accepted.sum()) / step.rows
        if band.seen <= tries:
            band.lost += float(expected[size]) + (step.seconds.reading if step.seconds else 0.0)
            band.lost -= float(expected[0]) * (1 + accepted)
        promised = np.concatenate([[0.0], np.exp(step.promised).mean(0).cumsum()])
        self._learn_gain(band, size, promised)
        if not band.promised:  # the first promises are believed, as if they had come true in some steps before
            band.promised = band.came_true = float(promised[-1])
        pace = max(_PACE, 1 / (band.seen + tries))
        band.promised += pace * (float(promised[-1]) - band.promised)
        band.came_true += pace * (accepted - band.came_true)
        if band.seen < tries:
            return
        band.verdict = self._verdict(band, step.load)
        if band.verdict.drafts:
            band.pause.failures = 0
        else:
            self._pause(band, step.load, band.lost)

    def count(self, step: StepObservation, sums: StepSums) -> None:
        """Add a step to sums, beside what plain decoding is estimated to take for as many tokens."""
        timed = step.seconds is not None
        if not step.asked:
            seconds = step.seconds.rest if step.seconds is not None else self.seconds(step.load, 0)
            sums.add(step.rows, 0, seconds, seconds, timed=timed, plain=True)
            return
        expected = self._seconds(self._band(step.rows), step.load)
        seconds = float(expected[self._nodes.searchsorted(step.asked)])
        if step.seconds is not None:
            seconds = step.seconds.reading + step.seconds.drafting + step.seconds.rest
        plain = float(expected[0]) * step.tokens / step.rows
        sums.add(step.rows, int((step.verified > 0).sum()), seconds, plain, timed=timed, plain=False)

    def verdict(self, rows: int) -> Verdict | None:
        """Last decision whether drafting pays in steps of `rows` rows; None before the first."""
        return self._band(rows).verdict

    def choices(self) -> tuple[BatchChoice, ...]:
        """Choices at each batch size that has been seen; see `Budget.choices`."""
        return tuple(
            BatchChoice(int(rows), "", 0, (), band.verdict, replace(band.sums))
            for rows, band in zip(self.table.batches, self._bands, strict=True)
            if band.sums.steps
        )

    def renewed(self, member: int) -> None:
        """End all pauses; what is believed is corrected by the steps that come. See `Budget.renewed`."""
        for band in self._bands:
            band.look_again()
            band.pause.forget()

    def best(self, load: StepLoad) -> tuple[float, int]:
        """Tokens per second and row to expect of the best number of nodes, and that number; 0 is plain decoding."""
        rates = self._rates(self._band(load.rows), load)
        return float(rates.max()), int(self._nodes[rates.argmax()])

    def drafted_rate(self, load: StepLoad) -> float:
        """Tokens per second and row to expect of the best number of nodes but none."""
        return float(self._rates(self._band(load.rows), load)[1:].max())

    def expected_loss(self, load: StepLoad, rate: float) -> float:
        """Seconds that a drafted step takes beyond what as many tokens take at `rate` tokens per second and row."""
        band = self._band(load.rows)
        rates, seconds = self._rates(band, load), self._seconds(band, load)
        best = 1 + int(rates[1:].argmax())
        return max(float(seconds[best] * (1 - rates[best] / rate)), 0.0)

    def seconds(self, load: StepLoad, nodes: int) -> float:
        """Seconds to expect of a step with so many draft nodes, one of the table's numbers."""
        return float(self._seconds(self._band(load.rows), load)[self._nodes.searchsorted(nodes)])

    def drafts(self, rows: int) -> bool:
        """True if the next step of `rows` rows is outside of a pause."""
        return not self._band(rows).pause.left

    def look_again(self, rows: int) -> None:
        """End the pause, if there is one."""
        self._band(rows).look_again()

    def band_of(self, rows: int) -> int:
        """Index of the measured batch size that is closest to `rows`, in ratio."""
        if rows not in self._band_of:
            self._band_of[rows] = int(np.abs(np.log(self._batches / rows)).argmin())
        return self._band_of[rows]

    def _observe_plain(self, band: _Band, step: StepObservation) -> None:
        """Learn what a plain step takes, with little work: of a small base, these come in thousands a second."""
        band.pause.step()
        band.run = max(band.run - 1, 0)
        band.plain += 1
        if step.seconds is not None and band.plain > _COLD:
            band.told += 1
            expected = float(band.slower[0]) * band.costs.plain_seconds(step.load)
            band.slower[0] *= _correction(step.seconds, expected, max(_PACE, 1 / (_TRUST + band.told)))

    def _count_drafted(self, band: _Band, timed: bool) -> None:
        """Begin a run of plain steps, if one is due and would tell something."""
        band.plain = 0
        band.until_run -= timed
        if not band.until_run:
            band.until_run, band.run = _NEXT_RUN, _RUN

    def _pause(self, band: _Band, load: StepLoad, lost: float) -> None:
        """Make plain steps until a look that costs `lost` seconds is a small share of them."""
        steps = math.ceil(lost / (_LOOKS * float(self._seconds(band, load)[0])))
        band.look_again()
        band.pause.begin(max(steps, steps_to_see(_TRIED_TREES, load.rows)), _LONGEST_PAUSE)

    def _verdict(self, band: _Band, load: StepLoad) -> Verdict:
        """Cost and gain of each draft token of the best tree. Drafting pays where a step's rate is above plain
        decoding's, (1 + gain) / (1 + cost) > 1."""
        tokens, seconds = self._tokens(band), self._seconds(band, load)
        best = 1 + int((tokens / seconds)[1:].argmax())
        nodes = int(self._nodes[best])
        return Verdict(nodes, float(seconds[best] / seconds[0] - 1) / nodes, float(tokens[best] - 1) / nodes)

    def _learn_gain(self, band: _Band, size: int, promised: Floats) -> None:
        """Average what the leading nodes of a tree of the `size`-th number promised, and extend it to larger trees."""
        known, larger = slice(0, size + 1), slice(size + 1, None)
        band.gain[known] += max(_PACE, 1 / band.seen) * (promised[self._nodes[known]] - band.gain[known])
        band.gain[larger] = band.gain[size] * self._growth[larger] / self._growth[size]

    def _rates(self, band: _Band, load: StepLoad) -> Floats:
        """Tokens per second and row `[M]` to expect of each number of nodes."""
        return self._tokens(band) / self._seconds(band, load)

    def _seconds(self, band: _Band, load: StepLoad) -> Floats:
        """Seconds `[M]` to expect of a step with each number of nodes."""
        return band.slower * band.costs.seconds(load, self._tokens(band))

    def _tokens(self, band: _Band) -> Floats:
        """Tokens `[M]` to expect of each number of nodes, a row."""
        return 1.0 + band.truth * band.gain

    def _band(self, rows: int) -> _Band:
        return self._bands[self.band_of(rows)]


def _correction(taken: StepSeconds, expected: float, pace: float) -> float:
    """Factor on a step's estimated latency, by an EMA of weight `pace`."""
    ratio = (taken.drafting + taken.rest) / expected
    return 1 + pace * (min(max(ratio, 1 / _MOST), _MOST) - 1)

"""Adapts the number of draft tokens to what pays, and retries with exponential back-off where drafting does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drafter.budget.contract import Floats, StepLoad, StepObservation, StepSeconds
from drafter.budget.latency_table import LatencyTable, StepCosts
from drafter.drafters.contract import Ask
from drafter.statistics import BatchChoice, StepSums, Verdict

_MOST_DOUBLINGS = 2
"""A pause doubles this many times at most."""
_PACE = 0.03
"""EMA weight of the newest step. Low, because acceptance is noisy."""
_TRIED_TREES = 8
"""Drafting may be given up after this many trees. Earlier estimates count for as many."""
_FEWEST_STEPS = 2
"""Fewest drafted steps that are evidence, however many trees each of them has."""
HOPELESS = 0.8
"""Drafting is hardly worth a try below this share of another rate."""
_FIRST_RUN, _NEXT_RUN = 64, 1024
"""Drafted steps before the first run of plain ones, and between two, which measure a plain step while drafting pays."""
_RUN = 8
"""Plain steps of a run."""
_COLD = 2
"""First plain steps after drafted ones are not representative: little of the model is in the processor's caches."""
_TRUST = 8
"""The latency measured at start counts for this many plain steps."""
_MOST = 2.0
"""A step's time ÷ its expected latency is clamped to this, either way: the process may have been stopped."""
_LOOKS = 0.015
"""Share of the time that may be lost by trying drafting again where it did not pay."""
_LONGEST_PAUSE = 4096
"""Most plain steps until drafting is tried again."""


@dataclass
class Pause:
    """Exponential back-off between retries: the steps `left`, and the `failures` that lengthen the next pause."""

    left: int = 0
    failures: int = 0

    def begin(self, steps: int, longest: int) -> None:
        """Begin a pause of `steps` steps after a first failure; of more after others, but at most `longest`."""
        self.left = min(steps << self.failures, longest)
        self.failures = min(self.failures + 1, _MOST_DOUBLINGS)

    def step(self) -> None:
        self.left = max(self.left - 1, 0)

    def forget(self) -> None:
        self.left = self.failures = 0


def steps_to_see(trees: int, rows: int) -> int:
    """Return the drafted steps of `rows` rows that make so many trees, and enough steps to be evidence."""
    return max(math.ceil(trees / rows), _FEWEST_STEPS)


@dataclass
class Band:
    """Estimates for steps of about `rows` rows."""

    rows: int
    nodes: npt.NDArray[np.int64]  # `[M]` numbers of draft tokens, rising from 0
    costs: StepCosts
    gain: Floats  # `[M]` accepted tokens per row that the drafter promises of each number
    slower: Floats  # `[M]` time of a step with each number ÷ its latency by the table
    promised: float = 0.0  # EMA of the accepted tokens per row that trees promised; 0 before the first one
    came_true: float = 0.0  # EMA of the accepted tokens that they brought
    seen: int = 0  # drafted steps since the start or the last pause
    lost: float = 0.0  # seconds of the first of these beyond plain decoding's for as many tokens
    pause: Pause = field(default_factory=Pause)  # plain steps before drafting is tried again
    entered: bool = False
    until_run: int = _FIRST_RUN  # drafted steps before the next run of plain ones
    run: int = 0  # plain steps left of such a run
    plain: int = 0  # plain steps since the last drafted one
    told: int = 0  # plain steps that have been timed
    verdict: Verdict | None = None
    sums: StepSums = field(default_factory=StepSums)

    def tokens(self) -> Floats:
        """Tokens `[M]` per row to expect of each number of draft tokens."""
        # A tree that promises nothing does not show which share of promises comes true.
        return 1.0 + (self.came_true / self.promised if self.promised else 1.0) * self.gain

    def seconds(self, load: StepLoad) -> Floats:
        """Seconds `[M]` to expect of a step with each number of draft tokens."""
        return self.slower * self.costs.seconds(load, self.tokens())

    def step_seconds(self, load: StepLoad, nodes: int) -> float:
        """Seconds to expect of a step with `nodes` draft tokens, one of the table's numbers."""
        return float(self.seconds(load)[self.nodes.searchsorted(nodes)])

    def rates(self, load: StepLoad) -> Floats:
        """Tokens per second and row `[M]` to expect of each number of draft tokens."""
        return self.tokens() / self.seconds(load)

    def best(self, load: StepLoad) -> tuple[float, int]:
        """Largest of `rates` and its number of draft tokens; 0 is plain decoding."""
        rates = self.rates(load)
        return float(rates.max()), int(self.nodes[rates.argmax()])

    def drafted_rate(self, load: StepLoad) -> float:
        """Largest of `rates`, plain decoding left out."""
        return float(self.rates(load)[1:].max())

    def expected_loss(self, load: StepLoad, rate: float) -> float:
        """Seconds that a drafted step takes beyond what as many tokens take at `rate` tokens per second and row."""
        rates, seconds = self.rates(load), self.seconds(load)
        best = 1 + int(rates[1:].argmax())
        return max(float(seconds[best] * (1 - rates[best] / rate)), 0.0)

    def plan(self, load: StepLoad) -> Ask:
        """Ask for the best number of draft tokens above 0; for none during pauses and runs of plain steps."""
        if self.pause.left or self.run:
            return Ask(0)
        nodes = int(self.nodes[1 + self.rates(load)[1:].argmax()])
        return Ask(nodes, 1 / (nodes + 1))

    def begin_like(self, other: Band, load: StepLoad) -> None:
        """Adopt another batch size's estimates of acceptance, which follow from drafter and text alone."""
        self.gain = other.gain.copy()
        self.promised, self.came_true = other.promised, other.came_true
        self._decide(load)
        plain = float(self.rates(load)[0])
        if self.drafted_rate(load) < HOPELESS * plain:
            self._give_up(load, steps_to_see(_TRIED_TREES, load.rows) * self.expected_loss(load, plain))

    def look_again(self) -> None:
        """End the pause, if there is one."""
        self.pause.left = self.seen = 0
        self.lost = 0.0

    def count(self, step: StepObservation, sums: StepSums) -> None:
        """Add a step to `sums`, with plain decoding's estimated time for as many tokens."""
        timed = step.seconds is not None
        if not step.asked:
            seconds = step.seconds.rest if step.seconds is not None else self.step_seconds(step.load, 0)
            sums.add(step.rows, 0, seconds, seconds, timed=timed, plain=True)
            return
        expected = self.seconds(step.load)
        seconds = float(expected[self.nodes.searchsorted(step.asked)])
        if step.seconds is not None:
            seconds = step.seconds.reading + step.seconds.drafting + step.seconds.rest
        plain = float(expected[0]) * step.tokens / step.rows
        sums.add(step.rows, int((step.verified > 0).sum()), seconds, plain, timed=timed, plain=False)

    def learn(self, step: StepObservation) -> None:
        """Learn what draft tokens are worth and what they cost."""
        if not step.asked:
            self._learn_plain(step)
            return
        self.plain = 0
        self.until_run -= step.seconds is not None
        if not self.until_run:
            self.until_run, self.run = _NEXT_RUN, _RUN
        size = int(self.nodes.searchsorted(step.asked))
        expected = self.seconds(step.load)
        if step.seconds is not None:
            correction = _correction(step.seconds, float(expected[size]), _PACE)
            self.slower[size] *= correction
            expected[size] *= correction
        self.seen += 1
        tries = steps_to_see(_TRIED_TREES, step.rows)
        accepted = float(step.accepted.sum()) / step.rows
        if self.seen <= tries:
            self.lost += float(expected[size]) + (step.seconds.reading if step.seconds else 0.0)
            self.lost -= float(expected[0]) * (1 + accepted)
        self._learn_gain(size, step, accepted, tries)
        if self.seen < tries:
            return
        if self._decide(step.load).drafts:
            self.pause.failures = 0
        else:
            self._give_up(step.load, self.lost)

    def _learn_plain(self, step: StepObservation) -> None:
        """Learn what a plain step takes, with little work: a small model makes thousands a second."""
        self.pause.step()
        self.run = max(self.run - 1, 0)
        self.plain += 1
        if step.seconds is not None and self.plain > _COLD:
            self.told += 1
            expected = float(self.slower[0]) * self.costs.plain_seconds(step.load)
            self.slower[0] *= _correction(step.seconds, expected, max(_PACE, 1 / (_TRUST + self.told)))

    def _learn_gain(self, size: int, step: StepObservation, accepted: float, tries: int) -> None:
        """Average what a tree of the `size`-th number promised and brought, and extend it to larger trees."""
        promised = np.concatenate([[0.0], np.exp(step.promised).mean(0).cumsum()])
        known, larger = slice(0, size + 1), slice(size + 1, None)
        self.gain[known] += max(_PACE, 1 / self.seen) * (promised[self.nodes[known]] - self.gain[known])
        growth = np.log1p(self.nodes)
        self.gain[larger] = self.gain[size] * growth[larger] / growth[size]
        if not self.promised:  # the first promises count as if they had come true in some steps before
            self.promised = self.came_true = float(promised[-1])
        pace = max(_PACE, 1 / (self.seen + tries))
        self.promised += pace * (float(promised[-1]) - self.promised)
        self.came_true += pace * (accepted - self.came_true)

    def _decide(self, load: StepLoad) -> Verdict:
        """Set the verdict: drafting pays where (1 + gain) / (1 + cost) > 1."""
        tokens, seconds = self.tokens(), self.seconds(load)
        best = 1 + int((tokens / seconds)[1:].argmax())
        nodes = int(self.nodes[best])
        cost, gain = float(seconds[best] / seconds[0] - 1), float(tokens[best] - 1)
        self.verdict = Verdict(nodes, cost / nodes, gain / nodes)
        return self.verdict

    def _give_up(self, load: StepLoad, lost: float) -> None:
        """Make plain steps until a retry that costs `lost` seconds is a small share of them."""
        steps = math.ceil(lost / (_LOOKS * float(self.seconds(load)[0])))
        self.look_again()
        self.pause.begin(max(steps, steps_to_see(_TRIED_TREES, load.rows)), _LONGEST_PAUSE)


class AdaptiveBudget:
    """Chooses the number of draft tokens of each step, by the latencies of this machine; see `Budget`."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        nodes = np.array(table.nodes)
        # Accepted tokens grow about as the logarithm of the nodes. How steeply is learnt from the first tree.
        growth = np.log1p(nodes)
        self.bands = [
            Band(int(rows), nodes, table.costs(int(rows)), growth / 2, np.ones(len(nodes))) for rows in table.batches
        ]
        self._place_of: dict[int, int] = {}

    def place(self, rows: int) -> int:
        """Return the index of the measured batch size that is closest to `rows`, in ratio."""
        if rows not in self._place_of:
            self._place_of[rows] = int(np.abs(np.log(self.table.batches / rows)).argmin())
        return self._place_of[rows]

    def band(self, rows: int) -> Band:
        return self.bands[self.place(rows)]

    def enter(self, load: StepLoad) -> bool:
        """Begin a batch size, at its first step, with estimates of the nearest other one; return if it has any."""
        place = self.place(load.rows)
        band = self.bands[place]
        known = [] if band.entered else [other for other, one in enumerate(self.bands) if one.promised]
        band.entered = True
        if not known:
            return False
        band.begin_like(self.bands[min(known, key=lambda other: abs(other - place))], load)
        return True

    def plan(self, load: StepLoad) -> Ask:
        self.enter(load)
        return self.band(load.rows).plan(load)

    def observe(self, step: StepObservation) -> None:
        band = self.band(step.rows)
        band.count(step, band.sums)
        band.learn(step)

    def choices(self) -> tuple[BatchChoice, ...]:
        return tuple(
            BatchChoice(band.rows, "", 0, (), band.verdict, replace(band.sums))
            for band in self.bands
            if band.sums.steps
        )

    def renewed(self, member: int) -> None:
        for band in self.bands:
            band.look_again()
            band.pause.forget()


def _correction(taken: StepSeconds, expected: float, pace: float) -> float:
    """Return the factor on a step's estimated latency, by an EMA of weight `pace`."""
    ratio = (taken.drafting + taken.rest) / expected
    return 1 + pace * (min(max(ratio, 1 / _MOST), _MOST) - 1)

"""How many draft nodes are worth their time: speculation must never be slower than not speculating.

The nodes of a step maximise expected tokens per second, `(rows + Σ π) / latency(rows, nodes)`, twice in a step: before
drafting, from what the last trees promised, for trees that are not larger than it pays to draft; and after it, from the
trees' own prices π, for what it pays to verify. Then the nodes go to the rows where they are worth most. Latencies are
measured on this machine at start; the prices are calibrated against what is really accepted.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from drafter.budget.cost_model import Floats, LatencyTable

Sizes = npt.NDArray[np.int64]
Cut = Literal["each", "alike", "never"]
"""How trees may be cut once they are drafted: each by itself, all to one size, or not at all."""


LEAST_AT_FIRST = 1 / 8
"""What is less probable is not looked for, until it is known what is verified."""


class Calibration:
    """Prices against what came true: the share of accepted nodes among those offered at about the same price.

    Old evidence fades, so that the calibration follows the text. Until evidence comes, prices are believed.
    """

    _EDGES = np.linspace(-8.0, 0.0, 33)
    _PRIOR = 8.0
    _FADE = 0.998

    def __init__(self) -> None:
        self._offered = np.zeros(len(self._EDGES) + 1)
        self._accepted = np.zeros(len(self._EDGES) + 1)

    def observe(self, log_probs: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn from verified nodes `[...]`; nodes of price -inf are padding and do not count."""
        real = log_probs > -np.inf
        bucket = np.digitize(log_probs[real], self._EDGES)
        size = len(self._offered)
        self.fade(1)
        self._offered += np.bincount(bucket, minlength=size)
        self._accepted += np.bincount(bucket[accepted[real]], minlength=size)

    def fade(self, steps: int) -> None:
        """Old evidence is so many steps older."""
        self._offered *= self._FADE**steps
        self._accepted *= self._FADE**steps

    def probability(self, log_probs: Floats) -> Floats:
        """Calibrated acceptance probability of nodes at these log prices `[...]`; 0 for padding."""
        bucket = np.digitize(log_probs, self._EDGES)
        return (
            (self._accepted[bucket] + self._PRIOR * np.exp(log_probs))
            / (self._offered[bucket] + self._PRIOR)
            * (log_probs > -np.inf)
        )


class RecentMedian:
    """The median of the last values; 1.0 until something is seen. What stops a process for a while does not move it."""

    _WINDOW = 15

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=self._WINDOW)

    @property
    def seen(self) -> bool:
        """Whether there are any values."""
        return bool(self._values)

    @property
    def value(self) -> float:
        """Asked for far less often than there are values."""
        return median(self._values) if self._values else 1.0

    def observe(self, value: float) -> None:
        """Take in a value."""
        self._values.append(value)


class _Band:
    """What is known of steps of about the same number of rows: what they cost, and whether drafting pays.

    Args:
        sizes: Numbers of draft nodes in the table.
        comparison: Plain steps to make for a comparison.
        pause: Plain steps of the first pause.
    """

    def __init__(self, sizes: int, comparison: int, pause: int) -> None:
        # Against the table: plain steps, steps that draft (but for drafting), and drafting each size relative to these.
        self.plain_slowness, self.slowness = RecentMedian(), RecentMedian()
        self.dearness = [RecentMedian() for _ in range(sizes)]
        self.trials: list[int] | None = None  # sizes still to be tried, last first; None before the first ones
        self.comparison = comparison  # plain steps still to be made
        self.drafts = 0  # steps that have drafted since it was found to pay
        self.plain, self.pause = 0, pause  # steps of a pause so far, and of the whole of it
        self.pausing = False


class AdaptiveBudget:
    """Chooses the nodes of each step.

    Args:
        table: Latencies of this machine.
        cut: What can be done with drafted trees.
        margin: Drafting must promise to be this much faster than plain decoding before it is done.
    """

    _BURN_IN_ROWS = 16
    """Trees to see before anything is decided."""
    _DEAREST_LOOK = 4.0
    """Plain steps that a look at trees may cost, unless the smallest costs more: often it is for nothing."""
    _TRIALS, _TRIAL = 3, 3
    """Sizes that are tried next, the most promising ones, and for how many steps each, to see what they cost."""
    _WARM_UP, _COMPARISON = 8, 12
    """Plain steps that do not count after one that drafts: a processor's caches take so many to hold what plain steps
    need; and how many plain steps are made to compare, these included."""
    _HOPELESS, _CLOSE = 0.6, 0.9
    """What promises less than this, relative to plain decoding, is not tried: at first, and once costs are known."""
    _RENEW_EVERY = 16
    """Of so many steps that draft, one drafts trees of the next size, up and down by turns: do they pay by now?"""
    _COMPARE_EVERY = 256
    """Steps that draft between two comparisons, where the host knows how long steps take."""
    _RECONSIDER_EVERY = 32
    """Plain steps of a pause after which it is asked whether drafting pays by now; asking costs something, too."""
    _FIRST_PAUSE, _LONGEST_PAUSE = 64, 512
    """Plain steps before drafting is tried again; twice as many each time that it does not pay, four times where that
    is hopeless."""
    _PACE, _MOST_ROWS = 0.1, 4
    """Weight of the newest step in what price is still verified; and of each of its rows, but not of more than so many,
    in what is expected to be accepted."""
    _SLACK = 0.75
    """So much as probable as what is still verified: to be looked for, in case more is verified next time."""
    _WIDTH_SHARE = 0.25
    """Of what a node for each row costs, what one in the widest row alone costs: attention is padded to that row."""

    def __init__(self, table: LatencyTable, cut: Cut = "each", margin: float = 0.05) -> None:
        self._table, self._cut, self._margin = table, cut, margin
        # By number of rows: they are asked for at every step, and there are no more than slots.
        self._latencies: dict[int, tuple[Floats, Floats]] = {}
        self._band_of: dict[int, _Band] = {}
        self._calibration = Calibration()
        self._nodes = np.array(table.nodes)
        # [M, M] Accepted tokens a row that were expected over the last steps: of trees drafted to each size, by their
        # best nodes, so many a row.
        self._gain = np.zeros((len(table.nodes), len(table.nodes)))
        self._seen = np.zeros(len(table.nodes))
        # [M, M] What the widest row and so many nodes a row cost, and [M, M, M] which of these trees of each size have.
        self._shapes = self._cost(np.broadcast_to(self._nodes, self._gain.shape), self._nodes[:, None])
        self._possible = np.tri(len(self._nodes), dtype=bool)[:, :, None] & (self._nodes > 0)
        self._lowest = math.log(LEAST_AT_FIRST / self._SLACK)  # log price of the last nodes that are verified
        # For each number of rows in the table: few rows and many are off by different factors.
        self._bands = [_Band(len(table.nodes), self._COMPARISON, self._FIRST_PAUSE) for _ in table.batches]
        self._plain_run = 0  # plain steps one after another
        self._burn_in = self._BURN_IN_ROWS
        self._looked = False

    def draft(self, rows: int) -> int:
        """Nodes to draft in a step of `rows` rows; 0 for plain decoding."""
        band = self._band(rows)
        if band.pausing and band.plain + 1 < band.pause and band.plain % self._RECONSIDER_EVERY:
            band.plain += 1
            return 0
        self._looked = self._burn_in > 0
        if self._looked:
            return self._look(rows)
        if band.trials is None:
            rate, _ = self._promises(rows)
            worth = [int(size) for size in rate[1:].argsort() + 1 if rate[size] > self._HOPELESS * rate[0]]
            band.trials = self._trials(worth[-self._TRIALS :])
        if band.trials:
            return band.trials.pop()
        if band.comparison > 0 and band.slowness.seen:
            band.comparison -= 1
            return 0
        rate, best = self._promises(rows)
        if rate[best] > (1.0 if band.drafts else 1.0 + self._margin) * rate[0]:
            band.pausing, band.plain, band.pause = False, 0, self._FIRST_PAUSE
            band.drafts += 1
            if band.drafts % self._COMPARE_EVERY == 0:
                band.comparison = self._COMPARISON
            turn, rest = divmod(band.drafts, self._RENEW_EVERY)
            if rest == 0:
                best += 1 if turn % 2 else -1
            return int(self._nodes[min(max(best, 1), len(self._nodes) - 1)])
        band.pausing, band.drafts = True, 0
        band.plain += 1
        if band.plain < band.pause:
            return 0
        # The text has gone on: what was learnt before the pause counts for less.
        self._calibration.fade(band.plain)
        self._seen = np.minimum(self._seen, 1)
        longer = 2 if rate[best] > self._HOPELESS * rate[0] else 4
        band.plain, band.pause = 0, min(longer * band.pause, self._LONGEST_PAUSE)
        if rate[best] > self._CLOSE * rate[0]:
            band.trials = self._trials([best])
        self._looked = True
        return self._look(rows)

    def _trials(self, sizes: list[int]) -> list[int]:
        """What to try, last first: trees of these sizes, and of the next one where nobody knows what it would bring."""
        largest = int(self._seen.nonzero()[0].max(initial=0))
        beyond = [largest + 1] if largest in sizes and largest + 1 < len(self._nodes) else []
        return [int(self._nodes[size]) for size in [*beyond, *sizes] for _ in range(self._TRIAL)]

    def _look(self, rows: int) -> int:
        """The most nodes that are not too dear to be looked at: if trees can be cut, few of them need be verified."""
        verify, draft = self._now(rows)
        least = verify if self._cut == "never" else np.minimum(verify, verify[1])
        bearable = self._nodes[least + draft <= self._DEAREST_LOOK * verify[0]]
        return int(max(bearable[-1], self._nodes[1]))

    @property
    def least(self) -> float:
        """Probability below which drafting need not go on."""
        return self._SLACK * math.exp(self._lowest)

    def sizes(self, log_probs: Floats) -> Sizes:
        """Draft nodes of each row to verify `[B]`, given the trees: log prices `[B, N]` without the root, falling."""
        rows, drafted = log_probs.shape
        self._burn_in -= rows
        known = self._nodes <= drafted
        order, gain, count = self._best(log_probs, self._nodes[known])
        self._seen[known] += 1
        pace = np.maximum(1 - (1 - self._PACE) ** min(rows, self._MOST_ROWS), 1 / self._seen[known])[:, None]
        now = np.array([np.interp(self._nodes, *curve) for curve in zip(count, gain, strict=True)])
        self._gain[known] += pace * (now - self._gain[known])
        if self._cut == "never":
            return np.full(rows, drafted)
        verify, draft = self._now(rows)
        cost = self._cost(count, self._nodes[known][:, None])
        rate = (1.0 + gain) / (np.interp(cost, self._nodes, verify) + draft[known][-1])
        width, some = np.unravel_index(rate.argmax(), rate.shape)
        total = round((math.ceil(cost[width, some]) if self._cut == "alike" else count[width, some]) * rows)
        kept = order[order % drafted < self._nodes[width]][:total]
        prices = log_probs.flat[kept]
        if (real := prices[prices > -np.inf]).size:
            self._lowest += self._PACE * (real.min() - self._lowest)
        return np.bincount(kept // drafted, minlength=rows)

    def _best(self, log_probs: Floats, sizes: Sizes) -> tuple[Sizes, Floats, Floats]:
        """What may be verified of trees `[B, N]` that are drafted to each of `sizes` `[M]`, the last of which is N.

        Returns:
            `[B * N]` their nodes, best first; and `[M, B * N + 1]` what the first none, one, ... of those that a size
            has promise, in accepted tokens a row, and how many nodes a row they are.
        """
        rows, drafted = log_probs.shape
        # Calibrated, a node may seem more probable than its parent.
        calibrated = np.minimum.accumulate(self._calibration.probability(log_probs), axis=1)
        if self._cut == "each":
            order = np.argsort(-calibrated, axis=None, kind="stable")  # a row's equal nodes stay in their order
        else:
            order = np.arange(rows * drafted).reshape(rows, drafted).T.ravel()
        there = order % drafted < sizes[:, None]
        promised = calibrated.ravel()[order]
        gain, count = np.zeros((2, len(sizes), rows * drafted + 1))
        np.cumsum(there * (promised / rows), axis=1, out=gain[:, 1:])
        np.cumsum(there / rows, axis=1, out=count[:, 1:])
        return order, gain, count

    def observe(self, log_probs: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn which of the verified draft nodes `[B, N]` were accepted."""
        self._calibration.observe(log_probs, accepted)

    def clock(self, rows: int, drafted: int, sizes: Sizes, seconds: tuple[float, float]) -> None:
        """Learn how long a step took to draft trees, and for the rest: to verify so many nodes of each row `[B]`.

        The table was made on a quiet machine. On other text a search may cost more or less; handing out tokens costs
        something with every step; and what else runs on the machine slows down the many small operations of a plain
        step more than the large ones of verifying a tree.
        """
        self._plain_run = 0 if drafted else self._plain_run + 1
        if self._looked:
            return  # a look at larger trees, not a size in use; the first ones start slowly
        verify, draft = self._latency(rows)
        band = self._band(rows)
        drafting, rest = seconds
        if not drafted:
            if self._plain_run > self._WARM_UP:
                band.plain_slowness.observe(rest / float(verify[0]))
            return
        expected = float(np.interp(self._cost(sizes.mean(), sizes.max()), self._nodes, verify))
        band.slowness.observe(rest / expected)
        size = int(self._nodes.searchsorted(drafted))
        band.dearness[size].observe(drafting / rest / (float(draft[size]) / expected))

    def _promises(self, rows: int) -> tuple[Floats, int]:
        """Tokens a row `[M]` by the time that a step with each number of nodes takes, and the best number but 0."""
        verify, draft = self._now(rows)
        if self._cut == "never":
            rate = (1.0 + self._gain.diagonal()) / (verify + draft)
        else:
            # [M, M, M] By what is drafted, the widest row and what is verified.
            seconds = np.interp(self._shapes, self._nodes, verify) + draft[:, None, None]
            rate = ((1.0 + self._gain) / seconds).max(axis=(1, 2), where=self._possible, initial=0.0)
            rate[0] = 1.0 / verify[0]
        return rate, int(rate[1:].argmax()) + 1

    def _cost(self, count: Floats, widest: Sizes | int) -> Floats:
        """Nodes that alike trees would have that take as long as `count` a row on average, and none with more than
        `widest`.
        """
        if self._cut != "each":
            return np.ceil(count)
        return (1 - self._WIDTH_SHARE) * count + self._WIDTH_SHARE * widest

    def _now(self, rows: int) -> tuple[Floats, Floats]:
        """The table's latencies `[M]` as they are now, to verify and to draft, in units of a plain step's."""
        verify, draft = self._latency(rows)
        band = self._band(rows)
        slower = band.slowness.value / band.plain_slowness.value if band.plain_slowness.seen else 1.0
        known = [size for size, dearness in enumerate(band.dearness) if dearness.seen]
        dearness = (
            np.interp(self._nodes, self._nodes[known], [band.dearness[size].value for size in known]) if known else 1.0
        )
        return np.where(self._nodes > 0, slower, 1.0) * verify, slower * dearness * draft

    def _band(self, rows: int) -> _Band:
        if rows not in self._band_of:
            self._band_of[rows] = self._bands[int(np.abs(np.log(self._table.batches / rows)).argmin())]
        return self._band_of[rows]

    def _latency(self, rows: int) -> tuple[Floats, Floats]:
        if rows not in self._latencies:
            self._latencies[rows] = self._table.at(rows)
        return self._latencies[rows]


class FixedBudget:
    """Always the same number of nodes; for comparisons."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def draft(self, rows: int) -> int:
        """The fixed number, whatever the rows."""
        return self._nodes

    @property
    def least(self) -> float:
        """What a tree's nodes would be worth if all were alike: what follows less hardly ever comes true."""
        return 1 / (self._nodes + 1)

    def sizes(self, log_probs: Floats) -> Sizes:
        """The fixed number, whatever the trees."""
        return np.full(len(log_probs), min(self._nodes, log_probs.shape[1]))

    def observe(self, log_probs: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Nothing to learn."""

    def clock(self, rows: int, drafted: int, sizes: Sizes, seconds: tuple[float, float]) -> None:
        """Nothing to learn."""


Budget = AdaptiveBudget | FixedBudget

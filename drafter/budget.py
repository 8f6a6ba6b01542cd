"""How many draft nodes are worth their time: speculation must never be slower than not speculating.

The number of nodes N maximises expected tokens per second, `(rows + Σ_rows Σ_{i≤N} π_i) / latency(rows, N)`, twice in
a step: before drafting, from what the last trees promised, for a tree that is not larger than it pays to draft; and
after it, from the trees' own prices π, for what it pays to verify. Latencies are measured on this machine at start; the
prices are calibrated against what is really accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NODE_COUNTS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draft nodes a step may verify: few enough to measure, and a CUDA graph each."""


@dataclass(frozen=True)
class LatencyTable:
    """Measured seconds of a step's parts, interpolated between the measured batch sizes.

    Args:
        batches: `[K]` rows, rising.
        nodes: `[M]` draft nodes, rising from 0.
        verify: `[K, M]` seconds of the step without drafting.
        draft: `[K, M]` seconds of drafting trees of so many nodes; 0 for none.
    """

    batches: Floats
    nodes: tuple[int, ...]
    verify: Floats
    draft: Floats

    def at(self, rows: int) -> tuple[Floats, Floats]:
        """Seconds `[M]` of verifying each of `nodes`, and of drafting them, for `rows` rows."""
        verify, draft = (
            np.array([np.interp(rows, self.batches, column) for column in table.T])
            for table in (self.verify, self.draft)
        )
        return verify, draft


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

    def observe(self, log_prices: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn from verified nodes `[...]`; nodes of price -inf are padding and do not count."""
        real = log_prices > -np.inf
        bucket = np.digitize(log_prices[real], self._EDGES)
        size = len(self._offered)
        self.fade(1)
        self._offered += np.bincount(bucket, minlength=size)
        self._accepted += np.bincount(bucket[accepted[real]], minlength=size)

    def fade(self, steps: int) -> None:
        """Old evidence is so many steps older."""
        self._offered *= self._FADE**steps
        self._accepted *= self._FADE**steps

    def probability(self, log_prices: Floats) -> Floats:
        """Calibrated acceptance probability of nodes at these log prices `[...]`; 0 for padding."""
        bucket = np.digitize(log_prices, self._EDGES)
        return (
            (self._accepted[bucket] + self._PRIOR * np.exp(log_prices))
            / (self._offered[bucket] + self._PRIOR)
            * (log_prices > -np.inf)
        )


class RunningMean:
    """A mean that forgets; 1.0 until something is seen.

    Args:
        pace: Weight of the newest value, once there are many.
    """

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self.value, self.seen = 1.0, 0

    def observe(self, value: float) -> None:
        """Take in a ratio of times, which is not let be absurd: a process may be stopped for a while."""
        self.seen += 1
        self.value += max(self._pace, 1 / self.seen) * (min(max(value, 0.1), 10.0) - self.value)


class AdaptiveBudget:
    """Chooses the nodes of each step.

    Args:
        table: Latencies of this machine.
        margin: Drafting must promise to be this much faster than plain decoding before it is done.
    """

    _BURN_IN_ROWS = 16
    """Trees to see before anything is decided."""
    _DEAREST_LOOK = 4.0
    """Plain steps that a look at trees may cost, unless the smallest costs more: often it is for nothing."""
    _TRIAL = 4
    """Steps that then draft as much as seems best, and steps that draft nothing, to see what they cost."""
    _HOPELESS = 0.6
    """Where drafting promises less than this, relative to plain decoding, what it really costs need not be tried."""
    _RENEW_EVERY = 16
    """Of so many steps that draft, one drafts the largest trees: are more nodes worth it by now?"""
    _PLAIN_EVERY = 64
    """Of so many steps that draft, one does not, where the host knows how long steps take."""
    _RECONSIDER_EVERY = 8
    """Plain steps of a pause after which it is asked whether drafting pays by now; asking costs something, too."""
    _FIRST_PAUSE, _LONGEST_PAUSE = 32, 256
    """Plain steps before drafting is tried again; twice as many each time that it does not pay."""
    _PACE = 0.1
    """Weight of the newest step in running means."""

    def __init__(self, table: LatencyTable, margin: float = 0.1) -> None:
        self._table, self._margin = table, margin
        # By number of rows: it is asked for at every step, and there are no more than slots.
        self._latencies: dict[int, tuple[Floats, Floats]] = {}
        self._calibration = Calibration()
        self._nodes = np.array(table.nodes)
        # Expected accepted tokens a row at each node count, over the last steps that drafted so many.
        self._gain = np.zeros(len(table.nodes))
        self._seen = np.zeros(len(table.nodes))
        # Against the table: plain steps, steps that draft (but for drafting), and drafting relative to these.
        self._plain_slowness, self._slowness, self._dearness = (RunningMean(self._PACE) for _ in range(3))
        self._burn_in, self._trial, self._comparison = self._BURN_IN_ROWS, self._TRIAL, self._TRIAL
        self._drafts = 0
        self._plain, self._pause, self._paused_rows = 0, self._FIRST_PAUSE, 0

    def draft(self, rows: int) -> int:
        """Nodes to draft in a step of `rows` rows; 0 for plain decoding."""
        if rows == self._paused_rows and self._plain + 1 < self._pause and self._plain % self._RECONSIDER_EVERY:
            self._plain += 1
            return 0
        if self._burn_in > 0:
            self._burn_in -= rows
            return self._look(rows)
        rate, best = self._promises(rows)
        if rate[best] < self._HOPELESS * rate[0]:
            self._trial = 0
        if self._trial > 0:
            self._trial -= 1
            return int(self._nodes[best])
        if self._comparison > 0 and self._slowness.seen:
            self._comparison -= 1
            return 0
        if rate[best] > (1.0 + self._margin) * rate[0]:
            self._plain, self._pause = 0, self._FIRST_PAUSE
            self._drafts += 1
            if self._slowness.seen and self._drafts % self._PLAIN_EVERY == 0:
                return 0
            return int(self._nodes[-1 if self._drafts % self._RENEW_EVERY == 0 else best])
        self._plain += 1
        self._paused_rows = rows
        if self._plain < self._pause:
            return 0
        # The text has gone on: what was learnt before the pause counts for less.
        self._calibration.fade(self._plain)
        self._seen[:] = 1
        self._plain, self._pause = 0, min(2 * self._pause, self._LONGEST_PAUSE)
        self._trial = self._TRIAL
        return self._look(rows)

    def _look(self, rows: int) -> int:
        """The most nodes that are not too dear to be looked at."""
        verify, draft = self._latency(rows)
        bearable = self._nodes[verify + draft <= self._DEAREST_LOOK * verify[0]]
        return int(max(bearable[-1], self._nodes[1]))

    def nodes(self, log_prices: Floats) -> int:
        """Draft nodes to verify, given the rows' trees: log prices `[B, N]` without the root, falling."""
        calibrated = self._calibration.probability(log_prices)
        expected = np.concatenate([[0.0], calibrated.mean(axis=0).cumsum()])
        known = self._nodes < len(expected)
        gain = expected[self._nodes[known]]
        self._seen[known] += 1
        pace = np.maximum(self._PACE, 1 / self._seen[known])
        self._gain[known] += pace * (gain - self._gain[known])
        verify, _ = self._now(len(log_prices))
        return int(self._nodes[known][((1.0 + gain) / verify[known]).argmax()])

    def observe(self, log_prices: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn which of the verified draft nodes `[B, N]` were accepted."""
        self._calibration.observe(log_prices, accepted)

    def clock(self, rows: int, drafted: int, verified: int, seconds: tuple[float, float]) -> None:
        """Learn how long a step took to draft and for the rest, where the host knows it.

        The table was made on a quiet machine with text that means nothing. On real text a search may cost more or less;
        handing out tokens costs something with every step; and what else runs on the machine slows down the many small
        operations of a plain step more than the large ones of verifying a tree.
        """
        if self._trial == self._TRIAL:
            return  # a look at larger trees, not a size in use; the first ones start slowly
        verify, draft = self._latency(rows)
        drafting, rest = seconds
        if not drafted:
            self._plain_slowness.observe(rest / float(verify[0]))
            return
        expected = float(np.interp(verified, self._nodes, verify))
        self._slowness.observe(rest / expected)
        self._dearness.observe(drafting / rest / (float(np.interp(drafted, self._nodes, draft)) / expected))

    def _promises(self, rows: int) -> tuple[Floats, int]:
        """Tokens a row `[M]` by the time that a step with each number of nodes takes, and the best number but 0."""
        verify, draft = self._now(rows)
        rate = (1.0 + self._gain) / (verify + draft)
        return rate, int(rate[1:].argmax()) + 1

    def _now(self, rows: int) -> tuple[Floats, Floats]:
        """The table's latencies `[M]` as they are now, to verify and to draft, in units of a plain step's."""
        verify, draft = self._latency(rows)
        slower = self._slowness.value / self._plain_slowness.value if self._plain_slowness.seen else 1.0
        return np.where(self._nodes > 0, slower, 1.0) * verify, slower * self._dearness.value * draft

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

    def nodes(self, log_prices: Floats) -> int:
        """The fixed number, whatever the tree."""
        return min(self._nodes, int(log_prices.shape[1]))

    def observe(self, log_prices: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Nothing to learn."""

    def clock(self, rows: int, drafted: int, verified: int, seconds: tuple[float, float]) -> None:
        """Nothing to learn."""


Budget = AdaptiveBudget | FixedBudget


def batch_sizes(slots: int) -> Sequence[int]:
    """Batch sizes to measure: powers of four up to `slots`, and `slots`."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(4 * sizes[-1], slots))
    assert all(a < b for a, b in pairwise(sizes))
    return sizes

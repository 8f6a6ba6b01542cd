"""How many draft nodes are worth verifying: speculation must never be slower than not speculating.

The number of nodes N maximises expected tokens per second, `(rows + Σ_rows Σ_{i≤N} π_i) / latency(rows, N)`. The
latency is measured on this machine at start; the prices π are calibrated against what is really accepted.
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
        draft: `[K]` seconds of drafting.
    """

    batches: Floats
    nodes: tuple[int, ...]
    verify: Floats
    draft: Floats

    def at(self, rows: int) -> tuple[Floats, float]:
        """Seconds of verifying each of `nodes` `[M]`, and of drafting, for `rows` rows."""
        verify = np.array([np.interp(rows, self.batches, column) for column in self.verify.T])
        return verify, float(np.interp(rows, self.batches, self.draft))


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
        self._offered = self._FADE * self._offered + np.bincount(bucket, minlength=size)
        self._accepted = self._FADE * self._accepted + np.bincount(bucket[accepted[real]], minlength=size)

    def probability(self, log_prices: Floats) -> Floats:
        """Calibrated acceptance probability of nodes at these log prices `[...]`; 0 for padding."""
        bucket = np.digitize(log_prices, self._EDGES)
        return (
            (self._accepted[bucket] + self._PRIOR * np.exp(log_prices))
            / (self._offered[bucket] + self._PRIOR)
            * (log_prices > -np.inf)
        )


class AdaptiveBudget:
    """Chooses the nodes of each step.

    Args:
        table: Latencies of this machine.
        margin: Drafting must promise to be this much faster than plain decoding before it is done.
    """

    _BURN_IN = 32
    """Steps that draft whatever is promised, until prices are calibrated."""
    _PROBE_EVERY, _PROBE_STEPS = 128, 8
    """After so many plain steps, so many that draft: does it pay by now?"""
    _PACE = 0.1
    """Weight of the newest step in the running gain."""

    def __init__(self, table: LatencyTable, margin: float = 0.03) -> None:
        self._table, self._margin = table, margin
        self._calibration = Calibration()
        self._nodes = np.array(table.nodes)
        # Expected accepted tokens a row at each node count, over the last steps that drafted.
        self._gain = np.zeros(len(table.nodes))
        self._drafted = self._plain = 0
        self._probing = self._BURN_IN

    def should_draft(self, rows: int) -> bool:
        """Whether a step of `rows` rows should draft at all."""
        if self._probing > 0:
            self._probing -= 1
            return True
        verify, draft = self._table.at(rows)
        speculative = (1.0 + self._gain[1:]) / (verify[1:] + draft)
        if speculative.max() * verify[0] > 1.0 + self._margin:
            return True
        self._plain += 1
        if self._plain % self._PROBE_EVERY == 0:
            self._probing = self._PROBE_STEPS
        return False

    def nodes(self, log_prices: Floats) -> int:
        """Draft nodes to verify, given the rows' trees: log prices `[B, N]` without the root, falling."""
        calibrated = self._calibration.probability(log_prices)
        expected = np.concatenate([[0.0], calibrated.mean(axis=0).cumsum()])
        gain = expected[np.minimum(self._nodes, len(expected) - 1)]
        self._drafted += 1
        pace = max(self._PACE, 1 / self._drafted)
        self._gain = (1 - pace) * self._gain + pace * gain
        verify, _ = self._table.at(len(log_prices))
        return int(self._nodes[((1.0 + gain) / verify).argmax()])

    def observe(self, log_prices: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn which of the verified draft nodes `[B, N]` were accepted."""
        self._calibration.observe(log_prices, accepted)


class FixedBudget:
    """Always the same number of nodes; for comparisons."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def should_draft(self, rows: int) -> bool:
        """Whether any node is wanted."""
        return self._nodes > 0

    def nodes(self, log_prices: Floats) -> int:
        """The fixed number, whatever the tree."""
        return min(self._nodes, int(log_prices.shape[1]))

    def observe(self, log_prices: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Nothing to learn."""


Budget = AdaptiveBudget | FixedBudget


def batch_sizes(slots: int) -> Sequence[int]:
    """Batch sizes to measure: powers of two up to `slots`, and `slots`."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(2 * sizes[-1], slots))
    assert all(a < b for a, b in pairwise(sizes))
    return sizes

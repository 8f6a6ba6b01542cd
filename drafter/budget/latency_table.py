"""What steps cost on this machine, by rows and draft nodes: measured at start, because no two machines are alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from drafter.budget.contract import Floats

NODE_COUNTS = (0, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Draft nodes a step may verify: few enough to measure, and a CUDA graph each. With its root a tree then has a round
number of nodes: MKL takes nearly one and a half times as long for 17 rows of a matrix as for 16."""
_PLAIN_RUN = 10
"""Plain steps that are timed one after another: the first ones find little of the base in a processor's caches."""


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


def measure_latency(
    probe: Callable[[int, int], tuple[float, float]],
    batches: Sequence[int],
    counts: Sequence[int],
    rounds: int = 5,
    seconds: float = 3.0,
) -> LatencyTable:
    """Time steps of every shape.

    Every round takes every shape once, and the least time counts: what else runs on the machine can only add to it, and
    rarely adds to the same shape each time. A round before them warms up.

    Args:
        probe: Does a step of so many rows and draft nodes; its seconds of drafting, and of the rest.
        batches: Rows, rising.
        counts: Draft nodes, rising from 0.
        rounds: At most so many.
        seconds: No further round begins after so long.
    """
    draft, rest = (np.full((len(batches), len(counts)), np.inf) for _ in range(2))
    begun = time.monotonic()
    for turn in range(rounds + 1):
        for i, rows in enumerate(batches):
            for k, nodes in enumerate(counts):
                # Steps that draft come one of a kind, as drafting leaves little of the base in a processor's caches.
                for _ in range(1 if nodes else _PLAIN_RUN):
                    drafting, remaining = probe(rows, nodes)
                    if turn:
                        draft[i, k], rest[i, k] = min(draft[i, k], drafting), min(rest[i, k], remaining)
        if turn and time.monotonic() - begun > seconds:
            break
    # Less work takes no longer; where it seemed to, something else was running.
    for table in (draft, rest):
        for axis in (0, 1):
            np.flip(table, axis)[:] = np.minimum.accumulate(np.flip(table, axis), axis)
    return LatencyTable(np.array(batches, dtype=np.float64), tuple(counts), rest, draft)


def batch_sizes(slots: int) -> Sequence[int]:
    """Batch sizes to measure: powers of four up to `slots`, and `slots`."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(4 * sizes[-1], slots))
    assert all(a < b for a, b in pairwise(sizes))
    return sizes

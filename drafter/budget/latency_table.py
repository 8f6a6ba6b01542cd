"""Latencies of steps by rows and draft nodes, measured on this machine at start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from drafter.budget.contract import Choosing, Floats, StepLoad

NODE_COUNTS = (0, 3, 4, 7, 9, 11, 15, 23, 31, 47, 63)
"""Draft nodes a step may verify: few enough to measure, and a CUDA graph each. With its root a tree then has a round
number of nodes: MKL takes nearly one and a half times as long for 17 rows of a matrix as for 16. A matrix unit has 16
rows, which the three parts of 5 nodes fill, and those of 10 twice."""
_PLAIN_RUN = 10
"""Plain steps that are timed one after another: the first ones find little of the base in a processor's caches."""
_LONG = 0.3
"""Seconds of a step that is timed again only if there is time: what only its first run must do is little of it."""


@dataclass(frozen=True)
class LatencyTable:
    """Measured seconds of a step's parts, interpolated between the measured batch sizes.

    Args:
        batches: `[K]` rows, rising.
        nodes: `[M]` draft nodes, rising from 0.
        verify: `[K, M]` seconds of the step without drafting.
        draft: `[K, M]` seconds of drafting trees of so many nodes; 0 for none.
        length: Committed tokens of the rows that were timed.
        longer: `[M]` seconds that a step takes more for each token that a row has beyond these; None if unknown.
        choosing: `[K]` seconds of choosing one token of each row, beyond those of the likeliest one.
        choices: `[M]` tokens that a step chooses of each row; None where it chooses those alone that come out.
    """

    batches: Floats
    nodes: tuple[int, ...]
    verify: Floats
    draft: Floats
    length: int = 0
    longer: Floats | None = None
    choosing: Mapping[Choosing, Floats] = field(default_factory=dict)
    choices: Floats | None = None

    def at(self, rows: int) -> tuple[Floats, Floats]:
        """Seconds `[M]` of verifying each of `nodes`, and of drafting them, for `rows` rows.

        They are those of short texts, and of tokens that are the likeliest ones.
        """
        verify, draft = (
            np.array([np.interp(rows, self.batches, column) for column in table.T])
            for table in (self.verify, self.draft)
        )
        return verify, draft

    def costs(self, rows: int) -> StepCosts:
        """Return the seconds of steps of `rows` rows, for all text lengths and kinds of sampling."""
        choice = {name: float(np.interp(rows, self.batches, column)) for name, column in self.choosing.items()}
        longer = None if self.longer is None else rows * self.longer
        return StepCosts(np.add(*self.at(rows)), self.length, longer, choice, self.choices)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps of one number of rows.

    Args:
        short: `[M]` seconds of a step with each number of nodes, over short texts, whose tokens are the likeliest.
        length: Committed tokens of a short text.
        longer: `[M]` seconds more for each token that all rows have beyond these.
        choice: Seconds more for a token of each row that is chosen in another way.
        choices: As in `LatencyTable`.
    """

    short: Floats
    length: int
    longer: Floats | None
    choice: Mapping[Choosing, float]
    choices: Floats | None

    def seconds(self, load: StepLoad, tokens: Floats) -> Floats:
        """Seconds `[M]` of a step, of which `tokens` `[M]` come out a row; the load's rows are taken to be these."""
        found = self.short
        if self.longer is not None and load.length > self.length:
            found = found + (load.length - self.length) * self.longer
        if choice := self.choice.get(load.choosing):
            found = found + choice * (tokens if self.choices is None else self.choices)
        return found

    def plain_seconds(self, load: StepLoad) -> float:
        """Seconds of a step without draft nodes: the first of `seconds`."""
        found = float(self.short[0])
        if self.longer is not None and load.length > self.length:
            found += (load.length - self.length) * float(self.longer[0])
        if choice := self.choice.get(load.choosing):
            found += choice * (1.0 if self.choices is None else float(self.choices[0]))
        return found


def measure_latency(
    probe: Callable[[int, int], tuple[float, float]],
    batches: Sequence[int],
    counts: Sequence[int],
    depth: int,
    rounds: int = 5,
    seconds: float = 3.0,
) -> LatencyTable:
    """Time steps of every shape that may pay.

    Every round takes every shape once, and the least time counts: what else runs on the machine can only add to it, and
    rarely adds to the same shape each time. A shape's first step warms up. Trees that cost more plain steps than they
    can have tokens are not timed but taken to cost as much a node as the largest that is.

    Args:
        probe: Does a step of so many rows and draft nodes; its seconds of drafting, and of the rest.
        batches: Rows, rising.
        counts: Draft nodes, rising from 0.
        depth: Draft tokens that a row may get at most.
        rounds: At most so many.
        seconds: No further round begins after so long, and no long step is timed again.
    """
    times = np.full((2, len(batches), len(counts)), np.inf)
    begun = time.monotonic()
    for turn in range(rounds):
        for i, rows in enumerate(batches):
            for k, nodes in enumerate(counts):
                if not turn and sum(first := probe(rows, nodes)) > _LONG:
                    times[:, i, k] = first
                is_long = _LONG < times[:, i, k].sum() < np.inf
                if not is_long or time.monotonic() - begun < seconds:
                    # Steps that draft come one of a kind: drafting leaves little of the base in a processor's caches.
                    for _ in range(1 if nodes or is_long else _PLAIN_RUN):
                        times[:, i, k] = np.minimum(times[:, i, k], probe(rows, nodes))
                if times[:, i, k].sum() > (1 + min(nodes, depth)) * times[:, i, 0].sum():
                    break
        if time.monotonic() - begun > seconds:
            break
    for row in times.reshape(-1, len(counts)):
        end = int(np.isfinite(row).sum())  # the larger trees' follow
        row[end:] = row[end - 1] * (1 + np.array(counts[end:])) / (1 + counts[end - 1])
    # Less work takes no longer; where it seemed to, something else was running.
    for axis in (1, 2):
        np.flip(times, axis)[:] = np.minimum.accumulate(np.flip(times, axis), axis)
    return LatencyTable(np.array(batches, dtype=np.float64), tuple(counts), times[1], times[0])


def batch_sizes(slots: int) -> Sequence[int]:
    """Batch sizes to measure: powers of four up to `slots`, and `slots`."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(4 * sizes[-1], slots))
    assert all(a < b for a, b in pairwise(sizes))
    return sizes

"""What a step costs: the latencies measured at start, corrected by what steps really take."""

from __future__ import annotations

import numpy as np

from drafter.budget.contract import Floats, StepObservation
from drafter.budget.latency_table import LatencyTable

_PACE = 0.1
"""Weight of the newest step in a correction."""
_MOST = 2.0
"""How far one step may seem to be off, relative to what is known: something else may have stopped the process."""


class _Corrections:
    """Factors on the table's latencies, for steps of about the same number of rows.

    Args:
        sizes: How many numbers of draft nodes the table has.
    """

    def __init__(self, sizes: int) -> None:
        self.verify = np.ones(sizes)
        self.draft = np.ones(sizes)


class CostModel:
    """Seconds of a step by its rows and draft nodes.

    Handing out tokens costs something with every step, a search costs more or less on other text, and what else runs on
    the machine slows small operations down more than large ones. So plain steps, steps with a tree, and drafting each
    size are corrected apart, and so are steps of few rows and of many.

    Args:
        table: Latencies measured on this machine.

    Attributes:
        nodes: `[M]` numbers of draft nodes, rising from 0.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.nodes = np.array(table.nodes)
        self._table = table
        # Asked for at every step, by number of rows, of which there are no more than slots.
        self._latencies: dict[int, tuple[Floats, Floats]] = {}
        self._corrections = [_Corrections(len(table.nodes)) for _ in table.batches]

    def band(self, rows: int) -> int:
        """Index of the measured batch size that is closest to `rows`, in ratio."""
        return int(np.abs(np.log(self._table.batches / rows)).argmin())

    def seconds(self, rows: int) -> tuple[Floats, Floats]:
        """Seconds `[M]` to verify each of `nodes`, with all else that a step does, and `[M]` to draft them."""
        verify, draft = self._measured(rows)
        corrections = self._corrections[self.band(rows)]
        return verify * corrections.verify, draft * corrections.draft

    def observe(self, step: StepObservation) -> None:
        """Learn from the seconds of a step, where they are known."""
        if step.seconds is None:
            return
        verify, draft = self.seconds(step.rows)
        corrections = self._corrections[self.band(step.rows)]
        drafting, rest = step.seconds.drafting, step.seconds.rest
        if not step.asked:
            _correct(corrections.verify, slice(0, 1), rest / float(verify[0]))
            return
        expected = float(np.interp(step.verified.mean(), self.nodes, verify))
        _correct(corrections.verify, slice(1, None), rest / expected)
        size = int(self.nodes.searchsorted(step.asked))
        _correct(corrections.draft, slice(size, size + 1), drafting / float(draft[size]))

    def _measured(self, rows: int) -> tuple[Floats, Floats]:
        if rows not in self._latencies:
            self._latencies[rows] = self._table.at(rows)
        return self._latencies[rows]


def _correct(factors: Floats, which: slice, ratio: float) -> None:
    """Move some factors towards what has been seen, `ratio` of what they made expected."""
    factors[which] *= 1 + _PACE * (min(max(ratio, 1 / _MOST), _MOST) - 1)

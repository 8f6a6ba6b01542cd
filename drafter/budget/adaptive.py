"""A budget that adapts: draft and verify as many nodes as give the most tokens per second, or none.

The nodes of a step maximise `(1 + expected accepted tokens) / latency`, twice: before drafting, by what recent trees
promised, and after it, by what these trees promise themselves. Then the nodes go to the rows where they are worth most.
What trees promise is calibrated against what is really accepted; latencies are measured on this machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from drafter.budget.calibration import Calibration
from drafter.budget.contract import Counts, Floats, StepObservation
from drafter.budget.cost_model import CostModel
from drafter.budget.latency_table import LatencyTable
from drafter.drafters.contract import Ask

Cut = Literal["each", "alike", "never"]
"""How trees may be cut once they are drafted: each by itself, all to one size, or not at all."""

_PACE = 0.1
"""Weight of the newest step in the averages."""
_MARGIN = 0.03
"""Drafting must promise to be this much faster than plain decoding."""
_LOOKS = 0.02
"""Share of the time that may go into steps that try drafting again where it did not pay."""
_LOOK_EVERY = 16
"""Of so many drafted trees one is verified as a whole."""
_SLACK = 0.75
"""A search goes on down to this fraction of the least probable verified node, as the next step may verify more."""


@dataclass
class _Band:
    """What is known of steps of about the same number of rows.

    Args:
        gain: `[M]` accepted tokens a row to expect of the best so many nodes.
        seen: Steps that this follows from; fewer count after a pause, as the text has gone on.
        left: Plain steps that are left of a pause.
        looking: Whether all of the next tree is verified, to see what its nodes are worth: after a pause, and now and
            then, or what is trimmed would never be known to have become better.
    """

    gain: Floats
    seen: int = 0
    left: int = 0
    looking: bool = True


@dataclass
class AdaptiveBudget:
    """Chooses the nodes of each step.

    Args:
        table: Latencies of this machine.
        cut: What can be done with drafted trees.
    """

    table: LatencyTable
    cut: Cut = "each"
    _calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        self._costs = CostModel(self.table)
        self._nodes = self._costs.nodes
        # Accepted tokens grow about as the logarithm of the nodes. How steeply is learnt from the first tree.
        self._growth = np.log1p(self._nodes)
        self._bands = [_Band(self._growth.copy()) for _ in self.table.batches]
        self._lowest = math.log(1 / (1 + self._nodes[-1]))  # log-probability of the last nodes that are verified

    def plan(self, rows: int) -> Ask:
        """What to draft in a step of `rows` rows."""
        band = self._bands[self._costs.band(rows)]
        if band.left:
            return Ask(0)
        return Ask(int(self._nodes[self._best(band, rows)]), _SLACK * math.exp(self._lowest))

    def trim(self, log_probs: Floats) -> Counts:
        """`[B]` draft nodes of each row that are worth verifying; see `Budget.trim`."""
        rows, drafted = log_probs.shape
        if self.cut == "never" or self._bands[self._costs.band(rows)].looking:
            return np.full(rows, drafted)
        verify, draft = self._costs.seconds(rows)
        probability = self._monotone(log_probs)
        if self.cut == "alike":
            gain = np.concatenate([[0.0], probability.mean(0).cumsum()])
            count = np.arange(drafted + 1)
        else:
            order = np.argsort(-probability, axis=None, kind="stable")  # a row's equal nodes stay in their order
            gain = np.concatenate([[0.0], probability.ravel()[order].cumsum() / rows])
            count = np.arange(rows * drafted + 1) / rows
        seconds = np.interp(count, self._nodes, verify) + np.interp(drafted, self._nodes, draft)
        best = int(((1.0 + gain) / seconds).argmax())
        if self.cut == "alike":
            return np.full(rows, best)
        return np.bincount(order[:best] // drafted, minlength=rows)

    def observe(self, step: StepObservation) -> None:
        """Learn what nodes are worth and what they cost; see `Budget.observe`."""
        self._costs.observe(step)
        band = self._bands[self._costs.band(step.rows)]
        if not step.asked:
            self._calibration.fade()
            band.left = max(band.left - 1, 0)
            band.looking = not band.left
            return
        self._calibration.observe(step.log_probs, step.accepted)
        real = step.log_probs[step.log_probs > -np.inf]
        if real.size:
            self._lowest += _PACE * (float(real.min()) - self._lowest)
        known = self._nodes <= step.asked
        promised = np.concatenate([[0.0], self._monotone(step.promised).mean(0).cumsum()])[self._nodes[known]]
        band.seen += 1
        band.looking = band.seen % _LOOK_EVERY == 0
        band.gain[known] += max(_PACE, 1 / band.seen) * (promised - band.gain[known])
        largest = int(known.sum()) - 1
        band.gain[~known] = band.gain[largest] * self._growth[~known] / self._growth[largest]
        if not self._pays(band, step.rows):
            band.seen = min(band.seen, 1)
            band.left = self._pause(step, largest)

    def _rates(self, band: _Band, rows: int) -> Floats:
        """Tokens per second and row `[M]` to expect of each number of nodes."""
        verify, draft = self._costs.seconds(rows)
        return (1.0 + band.gain) / (verify + draft)

    def _best(self, band: _Band, rows: int) -> int:
        """Index of the best number of nodes but 0."""
        return int(self._rates(band, rows)[1:].argmax()) + 1

    def _pays(self, band: _Band, rows: int) -> bool:
        rates = self._rates(band, rows)
        return bool(rates[1:].max() > (1.0 + _MARGIN) * rates[0])

    def _pause(self, look: StepObservation, size: int) -> int:
        """Plain steps that make up for a step that looked what nodes of the `size`-th number are worth."""
        verify, draft = self._costs.seconds(look.rows)
        reading = look.seconds.reading if look.seconds else 0.0
        return math.ceil((reading + float(verify[size] + draft[size])) / (_LOOKS * float(verify[0])))

    def _monotone(self, log_probs: Floats) -> Floats:
        """Calibrated probabilities `[B, N]`, made to fall along each row: a node is no likelier than its parent."""
        falling: Floats = np.minimum.accumulate(self._calibration.probability(log_probs), axis=1)
        return falling

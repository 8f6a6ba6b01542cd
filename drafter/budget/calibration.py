"""How probable a draft node is to be accepted, given what its drafter says: counted, not believed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drafter.budget.contract import Floats

_EDGES = np.linspace(-8.0, 0.0, 33)
"""Borders of the buckets of log-probabilities, in nats."""
_PRIOR = 8.0
"""Nodes of a bucket that are taken to have come true as the drafter said, before there is evidence."""
_WINDOW = 512.0
"""Nodes of a bucket that count, the newest ones most."""
_FADE = 0.998
"""What is left of the evidence after a step that brings none."""


class Calibration:
    """Share of accepted nodes among those offered at about the same log-probability.

    New evidence takes the place of old, so that the calibration follows the text. Until evidence comes, the drafter is
    believed.
    """

    def __init__(self) -> None:
        self._offered = np.zeros(len(_EDGES) + 1)
        self._accepted = np.zeros(len(_EDGES) + 1)

    def observe(self, log_probs: Floats, accepted: npt.NDArray[np.bool_]) -> None:
        """Learn which verified nodes `[...]` were accepted; nodes at -inf are padding and do not count."""
        real = log_probs > -np.inf
        bucket = np.digitize(log_probs[real], _EDGES)
        size = len(self._offered)
        self._offered += np.bincount(bucket, minlength=size)
        self._accepted += np.bincount(bucket[accepted[real]], minlength=size)
        kept = _WINDOW / np.maximum(self._offered, _WINDOW)
        self._offered *= kept
        self._accepted *= kept

    def fade(self) -> None:
        """Let a step pass that brings no evidence: the text goes on all the same."""
        self._offered *= _FADE
        self._accepted *= _FADE

    def probability(self, log_probs: Floats) -> Floats:
        """Calibrated acceptance probability of nodes at these log-probabilities `[...]`; 0 for padding."""
        bucket = np.digitize(log_probs, _EDGES)
        share = (self._accepted[bucket] + _PRIOR * np.exp(log_probs)) / (self._offered[bucket] + _PRIOR)
        return np.where(log_probs > -np.inf, share, 0.0)

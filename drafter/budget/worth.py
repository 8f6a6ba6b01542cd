"""Estimates of how many draft tokens of a drafter's trees are accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafter.budget.contract import Floats, ScoredTrees
from drafter.drafters.contract import MeasuredWorth

_PACE = 0.02
"""EMA weight of the newest tree. Low, because acceptance is noisy."""
_RECENT = 0.1
"""The same of the average that notices a change of the text."""
_CHANGED = 3.0
"""Standard deviations from the long average at which the text has changed."""
_GUESSED = 2
"""Trees that a first guess counts for, or what was measured on other text."""
_ENOUGH = 8
"""Trees that are evidence enough to draft by."""


@dataclass
class Worth:
    """Worth of one drafter's trees. It follows from drafter and text, not from the batch size.

    Nodes come in the order of their probability, so a tree's first nodes are the smaller tree: one tree tells what all
    smaller ones would have brought.
    """

    nodes: npt.NDArray[np.int64]  # `[M]` numbers of draft tokens, rising from 0
    gain: Floats = field(init=False)  # `[M]` EMA of accepted tokens per row
    drafted: Floats = field(init=False)  # `[M]` EMA of draft tokens per row: a tree may have fewer than asked for
    evidence: int = 0  # trees, or as many as what was measured counts for
    _weight: npt.NDArray[np.int64] = field(init=False)  # `[M]` trees that the averages stand for
    _recent: float | None = None  # short EMA of accepted tokens per row ÷ those of `gain`

    def __post_init__(self) -> None:
        # Accepted tokens grow about as the logarithm of the nodes.
        self._growth = np.log1p(self.nodes)
        self.forget()

    def forget(self) -> None:
        """Begin with a guess: the drafter's weights were replaced."""
        self.evidence, self._weight, self._recent = 0, np.full(len(self.nodes), _GUESSED), None
        self.gain, self.drafted = self._growth / 2, self.nodes.astype(np.float64)

    def believe(self, measured: MeasuredWorth) -> None:
        """Begin with what was measured on other text: enough to draft by, and soon outweighed."""
        self.evidence = _ENOUGH
        known = np.log1p([0, *measured.nodes])
        self.gain = np.interp(self._growth, known, [0.0, *measured.accepted])

    @property
    def is_known(self) -> bool:
        """True if there is evidence enough to draft by."""
        return self.evidence >= _ENOUGH

    def learn(self, scored: ScoredTrees) -> None:
        count, asked = scored.accepted.shape
        size = int(self.nodes.searchsorted(asked))
        known, larger = slice(0, size + 1), slice(size + 1, None)
        by_node = np.zeros(asked + 1)
        scored.accepted.sum(0).cumsum(out=by_node[1:])
        accepted = by_node[self.nodes[known]] / count
        drafted = np.minimum(scored.drafted[:, None], self.nodes[known]).sum(0) / count
        before = float(self.gain[size])
        self._notice_change(count, float(accepted[-1]), before)
        # The weight of a mean at first, and of an EMA later.
        weight = np.maximum(1 - (1 - _PACE) ** count, count / (self._weight[known] + count))
        self.gain[known] += weight * (accepted - self.gain[known])
        self.drafted[known] += weight * (drafted - self.drafted[known])
        self._weight[known] += count
        # Larger trees bring more in the proportion that is known of them.
        proportion = self.gain[larger] / before if before else self._growth[larger] / self._growth[size]
        self.gain[larger] = self.gain[size] * proportion
        self.drafted[larger] = self.drafted[size] * self.nodes[larger] / self.nodes[size]
        self.evidence += count

    @property
    def much(self) -> Floats:
        """Accepted tokens `[M]` per row of good trees: twice the first guess, or what these have been worth."""
        return np.maximum(np.minimum(self._growth, self.nodes), self.gain)

    def may_bring(self, ago: int) -> Floats:
        """Accepted tokens `[M]` per row at the upper end of their 95 % confidence interval.

        The newest tree was scored `ago` steps ago: trees lose their weight with steps as they do with other trees.
        """
        trees = np.minimum(self._weight, 1 / _PACE) * (1 - _PACE) ** ago
        gain = self.gain + 1 / trees  # few trees with nothing accepted do not mean that nothing ever is
        upper: Floats = np.minimum(self.gain + 2 * np.sqrt(gain * (1 + gain) / trees), self.nodes)
        return upper

    def _notice_change(self, count: int, accepted: float, expected: float) -> None:
        """Let new trees weigh more where they have lately brought much more, or less, than trees before."""
        if not expected:
            return
        ratio = accepted / expected
        self._recent = 1.0 if self._recent is None else self._recent
        self._recent += (1 - (1 - _RECENT) ** count) * (ratio - self._recent)
        # Accepted tokens spread about as a geometric distribution of this mean does.
        spread = np.sqrt((1 + expected) / expected * _RECENT / (2 - _RECENT))
        if abs(self._recent - 1) > _CHANGED * spread:
            self._weight[:], self._recent = _GUESSED, 1.0

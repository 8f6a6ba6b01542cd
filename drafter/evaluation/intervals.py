"""How sure figures of some prompts are: intervals by the bootstrap, and the sign test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]

_DRAWS, _SEED = 1000, 0
_FEWEST = 5  # questions from which on there is an interval: fewer say too little about those that were not asked


def bootstrap(questions: Sequence[int], figure: Callable[[NDArray[np.int64]], float]) -> Interval | None:
    """Return the 95 % confidence interval of a figure over prompts; None for fewer than five questions.

    Its ends are the 2.5th and the 97.5th percentile of the figure over as many questions drawn with replacement (Efron
    1979), each with all its prompts: the turns and samples of a question are alike. The same draws are made for each
    figure.

    Args:
        questions: The question of each prompt, `[P]`.
        figure: Returns the figure over the prompts with these indices, of which some come several times.
    """
    found, first = np.unique(np.asarray(questions, dtype=np.int64), return_inverse=True)
    if len(found) < _FEWEST:
        return None
    prompts = [np.flatnonzero(first == question) for question in range(len(found))]
    draws = np.random.default_rng(_SEED).integers(len(found), size=(_DRAWS, len(found)))
    low, high = np.percentile([figure(np.concatenate([prompts[one] for one in draw])) for draw in draws], (2.5, 97.5))
    return float(low), float(high)


def sign_test(successes: int, trials: int) -> float:
    """Return the two-sided probability of a count as far from the half or farther, if either side is as likely."""
    fewer = min(successes, trials - successes)
    ways: int = sum(comb(trials, count) for count in range(fewer + 1))
    return min(1.0, 2 * ways / (1 << trials))

"""Thresholds among many numbers without sorting them, and without the host looking at any of them.

A binary search reads all numbers once for each of their bits. Here a pass adds up what lies in each of thousands of
intervals, which settles a dozen bits at once (a radix selection). Sums are of integers, so they are the same in any
order, also in that of a GPU's atomic additions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_SETTLED = (63, 50, 37, 24, 12, 0)
"""Bits that are not settled yet, before each pass and after the last."""
PASSES = len(_SETTLED) - 1
"""How often all numbers are read."""
INTERVALS = sum(1 << (high - low) for high, low in pairwise(_SETTLED))
"""Intervals of all passes."""


def least_reaching(numbers: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """Return the least threshold `[R, 1]` such that the numbers up to it have the wanted weight.

    Three numbers 4, 7, 7 of weight 1 have a weight of 2 up to 7, and so of 3; of 4 they never have::

        numbers [[4, 7, 7]]   weights [[1, 1, 1]]   wanted [[2]] → [[7]]   wanted [[4]] → [[2⁶³ − 1]]

    Args:
        numbers: `[R, V]` int64, not negative; anything else gives some threshold.
        weights: `[R, V]` int64, not negative.
        wanted: `[R, 1]` int64, above 0; a row that has not so much gets the largest threshold.
    """
    least = torch.zeros_like(wanted)
    for high, low in pairwise(_SETTLED):
        count = 1 << (high - low)
        # The last interval has what is above all others, and the first one what is below, where anything can be:
        # nothing is below 0, and the largest numbers leave no room to count from less.
        below = (least > 0).long()
        place = (numbers - (least - (below << low))).bitwise_right_shift_(low).clamp_(0, count + 1)
        sums = torch.zeros(len(numbers), count + 2, dtype=torch.long, device=numbers.device)
        short = (sums.scatter_add_(1, place, weights).cumsum(1) < wanted).sum(1, keepdim=True) - below
        least = least + (short.clamp_(0, count - 1) << low)
    return least

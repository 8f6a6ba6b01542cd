"""Filters of sampling: which tokens top-k, top-p and min-p keep, each by a threshold on the scores.

A threshold needs no sorted vocabulary. Where the host may look at numbers, the best few scores are sorted, and all only
if these do not say enough. Elsewhere a binary search finds it, in as many passes as a number has bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter import devices

_FEW = 1024
"""Scores of a row that are sorted at first."""
_BITS, _INFINITE = 63, 0x7FF0000000000000
"""Bits of a float64 that is not negative, and those of the largest."""


def keep_ranked(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return scores of the tokens that top-k and then top-p keep, -inf elsewhere. Ties at a threshold are kept.

    Top-p keeps a token if those with larger scores have less than `top_p` of the probability that top-k leaves.

    Args:
        scores: `[R, V]` float64 after temperature; a row's largest is 0.
        top_k: `[R]`, 0 keeps all.
        top_p: `[R]` in (0, 1]; 1 keeps all.
    """
    vocabulary = scores.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp_max(vocabulary)
    if devices.is_asynchronous(scores.device):
        return scores.masked_fill(scores < _searched(scores, top_k, top_p), -torch.inf)
    lowest, enough = _sorted(scores, top_k, top_p, min(_FEW, vocabulary))
    if not enough:
        lowest, _ = _sorted(scores, top_k, top_p, vocabulary)
    return scores.masked_fill(scores < lowest, -torch.inf)


def keep_probable(scores: Tensor, min_p: Tensor) -> Tensor:
    """Return scores of the tokens with at least `min_p` `[R]` times the best one's probability, -inf elsewhere.

    Args:
        scores: `[R, V]` after temperature.
        min_p: `[R]` in [0, 1].
    """
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + min_p[:, None].log(), -torch.inf)


def _sorted(scores: Tensor, top_k: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, bool]:
    """Return the lowest scores that are kept, `[R, 1]`, and whether the best `count` scores were enough to know."""
    best = scores.topk(count).values
    all_ranks = (top_k == scores.shape[-1])[:, None]
    lowest = best.gather(1, top_k[:, None].clamp_max(count) - 1).masked_fill(all_ranks, -torch.inf)
    known = all_ranks | (top_k <= count)[:, None]
    mass = best.masked_fill(best < lowest, -torch.inf).exp()
    wanted = top_p[:, None] * scores.masked_fill(scores < lowest, -torch.inf).exp().sum(1, keepdim=True)
    kept = mass.cumsum(1) - mass < wanted
    # If even the last of these is kept, there may be more, but for those that top-k leaves out.
    known &= (top_p >= 1)[:, None] | ~kept[:, -1:] | (best[:, -1:] <= lowest)
    probable = best.masked_fill(~kept, torch.inf).amin(1, keepdim=True)
    return torch.where((top_p >= 1)[:, None], lowest, torch.maximum(lowest, probable)), bool(known.all())


def _searched(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest scores that are kept, `[R, 1]`, without looking at any number."""
    # Among numbers that are not negative the bits have the order of the numbers.
    below = (-scores).abs().view(torch.int64)
    lowest = _reached(below, torch.ones_like(scores), top_k.double())
    mass = scores.exp().masked_fill(below > lowest, 0)
    wanted = torch.where(top_p >= 1, torch.inf, top_p * mass.sum(1))
    return -torch.minimum(lowest, _reached(below, mass, wanted)).view(torch.float64)


def _reached(below: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """Return the least threshold `[R, 1]` whose numbers, and all smaller ones, have the wanted weight.

    Args:
        below: `[R, V]` int64, not negative.
        weights: `[R, V]` float64.
        wanted: `[R]` float64; a row that has not so much gets the largest threshold.
    """
    low = torch.full_like(below[:, :1], -1)
    high = torch.full_like(low, _INFINITE)
    for _ in range(_BITS):
        middle = low + (high - low >> 1)  # their sum would not fit
        reached = weights.masked_fill(below > middle, 0).sum(1, keepdim=True) >= wanted[:, None]
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high

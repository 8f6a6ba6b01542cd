"""Filters of sampling: which tokens top-k, top-p and min-p keep, each by a threshold on the scores.

A threshold needs no sorted vocabulary. Where the host may look at numbers, the best few scores are sorted, and all only
if these do not say enough. Elsewhere it is searched for (`threshold_search`).

Probabilities are added up as whole multiples of a small one. So a sum is the same in any order, and both ways keep the
same tokens, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter import devices
from drafter.verifiers.threshold_search import least_reaching

_FEW = 1024
"""Scores of a row that are sorted at first."""
_SUM_BITS = 62
"""Bits of the largest sum of a row's masses."""
_MORE_THAN_ALL = 2**63 - 1


def keep_ranked(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return scores of the tokens that top-k and then top-p keep, -inf elsewhere. Ties at a threshold are kept.

    Top-p keeps a token if those with larger scores have less than `top_p` of the probability that top-k leaves.

    Args:
        scores: `[R, V]` float64 after temperature; a row's largest is 0.
        top_k: `[R]`, 0 keeps all; None where all rows do.
        top_p: `[R]` in (0, 1]; 1 keeps all; None where all rows do.
    """
    if top_k is not None:
        top_k = torch.where(top_k > 0, top_k, scores.shape[-1]).clamp_max(scores.shape[-1])[:, None]
    if top_p is not None:
        top_p = top_p[:, None]
    if devices.is_asynchronous(scores.device):
        return scores.masked_fill(scores < _searched(scores, top_k, top_p), -torch.inf)
    lowest, enough = _sorted(scores, top_k, top_p, min(_FEW, scores.shape[-1]))
    if not enough:
        lowest, _ = _sorted(scores, top_k, top_p, scores.shape[-1])
    return scores.masked_fill(scores < lowest, -torch.inf)


def keep_probable(scores: Tensor, min_p: Tensor) -> Tensor:
    """Return scores of the tokens with at least `min_p` `[R]` times the best one's probability, -inf elsewhere.

    Args:
        scores: `[R, V]` after temperature; a row's largest is 0.
        min_p: `[R]` in [0, 1].
    """
    return scores.masked_fill(scores < min_p[:, None].log(), -torch.inf)


def _sorted(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, count: int) -> tuple[Tensor, bool]:
    """Return the lowest scores that are kept, `[R, 1]`, and whether the best `count` scores were enough to know."""
    best, places = scores.topk(count)
    lowest = torch.full_like(best[:, :1], -torch.inf)
    known = torch.ones_like(lowest, dtype=torch.bool)
    if top_k is not None:
        all_ranks = top_k == scores.shape[-1]
        lowest = best.gather(1, top_k.clamp_max(count) - 1).masked_fill(all_ranks, -torch.inf)
        known = all_ranks | (top_k <= count)
    if top_p is not None:
        masses = _masses(scores)
        if top_k is not None:
            masses = masses.masked_fill(scores < lowest, 0)
        leading = masses.gather(1, places)
        kept = leading.cumsum(1) - leading < _wanted(masses, top_p)
        # If even the last of these is kept, there may be more, but for those that top-k leaves out.
        known &= (top_p >= 1) | ~kept[:, -1:] | (best[:, -1:] <= lowest)
        probable = best.masked_fill(~kept, torch.inf).amin(1, keepdim=True)
        lowest = torch.where(top_p >= 1, lowest, torch.maximum(lowest, probable))
    return lowest, bool(known.all())


def _searched(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return the lowest scores that are kept, `[R, 1]`, without looking at any number."""
    # Among numbers that are not negative the bits have the order of the numbers.
    below = scores.abs().view(torch.int64)
    furthest = None
    if top_k is not None:
        furthest = least_reaching(below, torch.ones_like(top_k).expand_as(below), top_k)
    if top_p is not None:
        masses = _masses(scores)
        if furthest is not None:
            masses.masked_fill_(below > furthest, 0)
        probable = least_reaching(below, masses, _wanted(masses, top_p))
        furthest = probable if furthest is None else torch.minimum(furthest, probable)
    assert furthest is not None, "nothing is to be left out"
    return -furthest.view(torch.float64)  # not a number in a row that keeps all: nothing is below it


def _masses(scores: Tensor) -> Tensor:
    """Return probabilities `[R, V]` int64, up to a factor such that no sum of a row overflows."""
    return scores.exp().mul_(2.0 ** (_SUM_BITS - scores.shape[-1].bit_length())).long()


def _wanted(masses: Tensor, top_p: Tensor) -> Tensor:
    """Return the mass `[R, 1]` that top-p wants of the masses `[R, V]`; more than there is where it wants all."""
    total = masses.sum(1, keepdim=True)
    return torch.where(top_p < 1, torch.minimum((top_p * total).ceil().long(), total), _MORE_THAN_ALL)

r"""Sampling from scores: penalties on earlier tokens, top-k, top-p, min-p, and a draw by keyed Gumbel noise.

A draw takes the token with the largest sum of log-probability and Gumbel noise, which has the softmax's distribution
(Maddison, Tarlow and Minka 2014, *A\* sampling*). The noise is a hash of (seed, position, token), so rounding changes
a draw only at near ties. The hash is integer arithmetic, which is the same on every device, compiled or in a graph.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter import devices
from drafter.tree.token_tree import TokenTree

_Integers = npt.NDArray[np.int64]
Array = TypeVar("Array", Tensor, _Integers)
"""Integers on a device (PyTorch) or on the host (NumPy, which has less call overhead)."""

_SETTLED = (63, 50, 37, 24, 12, 0)
"""Bits that are not settled yet, before each pass of `least_reaching` and after the last."""
PASSES = len(_SETTLED) - 1
INTERVALS = sum(1 << (high - low) for high, low in pairwise(_SETTLED))  # intervals of all passes
_FEW = 1024  # scores of a row that are sorted at first
MASS_BITS = 62  # bits of the largest sum of a row's masses
_MORE_THAN_ALL = 2**63 - 1

POSITION_STEP, TOKEN_STEP = 0xC13FA9A902A6328F, 0x91E10DA5C79E7B1D
"""Steps of a counter from one position and from one pair of tokens to the next: 2⁶⁴ divided by the plastic number and
by its square (Roberts 2018, *The unreasonable effectiveness of quasirandom sequences*)."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's finaliser
MIDDLE, STEP = 2.0**31 + 0.5, 2.0**-32
"""Map 32-bit uniform noise to the middle of a step of the unit interval: probabilities are exact up to 2⁻³²."""
_LEAST_NOISE = -math.log(-math.log(STEP / 2))
_REACH = 8.0
"""A token at most this far below the best is a candidate. One farther below needs more noise than
`_REACH + _LEAST_NOISE`, which one in 130 has."""
_HIGH_NOISE = math.floor(math.exp(-math.exp(-_REACH - _LEAST_NOISE)) / STEP - MIDDLE) - 1
"""Uniform noise up to this is Gumbel noise up to `_REACH + _LEAST_NOISE`."""
_PORTION = 1 << 18  # tokens of all rows that are hashed together on the host, so that they stay in a core's cache


class History:
    """Counts of the tokens before each choice: the first `lengths` `[B]` of `tokens` `[B, L]`, and the path down the
    tree. The output begins at `prompt_lengths` `[B]`.
    """

    def __init__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        tree: TokenTree,
        ancestors: Tensor,
        vocabulary: int,
    ) -> None:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        in_text = position < lengths[:, None]
        in_output = in_text & (position >= prompt_lengths[:, None])
        self.seen, self.said = (_occurrences(tokens, counted, vocabulary) for counted in (in_text, in_output))
        self.real = tree.tokens >= 0
        # The root may be the prompt's last token.
        self.in_output = self.real & (lengths[:, None] + tree.depths >= prompt_lengths[:, None])
        self.tokens = tree.tokens.clamp_min(0)
        self.ancestors = ancestors

    def before(self, rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Count tokens before the choice at `nodes` `[R]` of `rows` `[R]`, `[R, V]` float64: all, and the output's."""
        own, path = self.tokens[rows], self.ancestors[rows, nodes]
        seen = self.seen[rows].scatter_add_(1, own, (path & self.real[rows]).double())
        said = self.said[rows].scatter_add_(1, own, (path & self.in_output[rows]).double())
        return seen, said


def _occurrences(tokens: Tensor, counted: Tensor, vocabulary: int) -> Tensor:
    found = counted.new_zeros(len(tokens), vocabulary, dtype=torch.float64)
    return found.scatter_add_(1, tokens, counted.double())


def penalise(
    scores: Tensor, seen: Tensor, said: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return scores `[R, V]` after three penalties, in this order.

    *Repetition* (Keskar et al. 2019, CTRL): scores of tokens of prompt and output are divided where positive and
    multiplied where negative. *Frequency* and *presence* (OpenAI): a token that occurs `c > 0` times in the output
    loses `c · frequency + presence`.

    `seen` `[R, V]` are counts in prompt and output, `said` in the output alone; the penalties are `[R]`.
    """
    repetition, frequency, presence = (setting[:, None] for setting in (repetition, frequency, presence))
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    return torch.where(seen > 0, repeated, scores) - (frequency * said + presence * (said > 0))


def keep_ranked(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return scores of the tokens that top-k and then top-p keep, -inf elsewhere. Ties at a threshold are kept.

    Top-p keeps a token if those with larger scores have less than `top_p` of the probability that top-k leaves.

    Args:
        scores: `[R, V]` float64 after temperature, each row's maximum 0.
        top_k: `[R]`, 0 keeps all; None if all rows do.
        top_p: `[R]` in (0, 1]; 1 keeps all; None if all rows do.
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

    The maximum of each row of `scores` `[R, V]`, after temperature, is 0.
    """
    return scores.masked_fill(scores < min_p[:, None].log(), -torch.inf)


def _sorted(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, count: int) -> tuple[Tensor, bool]:
    """Return the lowest scores that are kept, `[R, 1]`, and whether the best `count` scores sufficed to know."""
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
    """Return the lowest scores that are kept, `[R, 1]`, without host synchronisation."""
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
    """Return unnormalised probabilities `[R, V]` int64, scaled so that no row's sum overflows."""
    return scores.exp().mul_(2.0 ** (MASS_BITS - scores.shape[-1].bit_length())).long()


def _wanted(masses: Tensor, top_p: Tensor) -> Tensor:
    """Return the mass `[R, 1]` that top-p wants of `masses` `[R, V]`; more than there is where it wants all."""
    total = masses.sum(1, keepdim=True)
    return torch.where(top_p < 1, torch.minimum((top_p * total).ceil().long(), total), _MORE_THAN_ALL)


def least_reaching(numbers: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """Return the least threshold `[R, 1]` such that the numbers up to it have the wanted weight.

    A radix selection without sorting or host synchronisation: each pass sums the weights in thousands of intervals,
    which settles a dozen bits. Sums are of integers, so the order of a GPU's atomic additions does not matter::

        numbers [[4, 7, 7]]   weights [[1, 1, 1]]   wanted [[2]] → [[7]]   wanted [[4]] → [[2⁶³ − 1]]

    Args:
        numbers: `[R, V]` int64, not negative; otherwise the threshold is arbitrary.
        weights: `[R, V]` int64, not negative.
        wanted: `[R, 1]` int64, above 0; a row with less gets the largest threshold.
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


def seed_key(seed: int) -> int:
    """Hash a seed of any size to a signed 64-bit integer, so that near seeds have distant keys."""
    digest = blake2b(seed.to_bytes(seed.bit_length() // 8 + 1, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(scores: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row, `[R]` token ids.

    Args:
        scores: `[R, V]` float64 log-probabilities up to a constant: a row's maximum is 0, and -inf is never drawn.
        keys: `[R]` int64 `seed_key` of the rows' seeds.
        positions: `[R]` int64 indices of the tokens in their outputs.
    """
    if devices.is_asynchronous(scores.device):
        return gumbel(noise_bits(keys, positions, scores.shape[1])).add_(scores).argmax(-1)
    numbers = (scores.numpy(), keys.numpy(), positions.numpy())
    portion = max(_PORTION // scores.shape[1], 1)
    drawn = [_draw_on_host(*(part[at : at + portion] for part in numbers)) for at in range(0, len(scores), portion)]
    return torch.from_numpy(np.concatenate(drawn))


def _draw_on_host(scores: npt.NDArray[np.float64], keys: _Integers, positions: _Integers) -> _Integers:
    """Draw on the host, with Gumbel noise only for the tokens that can win.

    The best token's sum is at least `_LEAST_NOISE`. So a token more than `_REACH` below it loses unless its own noise
    is above `_REACH + _LEAST_NOISE`.
    """
    rows, size = scores.shape
    noise = hashes(keys, positions, np.arange(-(-size // 2))).view(np.int32)[:, :size]
    # A non-finite row also has candidates. Any of them will do, as its token is discarded.
    row, token = np.divmod(np.flatnonzero(~(scores < -_REACH) | (noise > _HIGH_NOISE)), size)
    sums = scores[row, token] - np.log(-np.log((noise[row, token] + MIDDLE) * STEP))
    best = np.fmax.reduceat(sums, np.searchsorted(row, np.arange(rows)))
    wins = sums == best[row]
    chosen = np.zeros(rows, dtype=np.int64)
    chosen[row[wins]] = token[wins]
    return chosen


def noise_bits(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return uniform noise `[R, V]`, 32-bit integers from −2³¹ on, of keys (see `draw`) and positions, both `[R]`
    int64.
    """
    hashed = hashes(keys, positions, torch.arange(-(-vocabulary // 2), device=keys.device))
    # Two tokens share a 64-bit hash: the even one has its lower half, the odd one its upper half. A view as 32-bit
    # integers would corrupt memory once compiled (torch 2.13 on a CPU).
    return torch.stack((hashed << 32 >> 32, hashed >> 32), 2).flatten(1)[:, :vocabulary]


def gumbel(noise: Tensor) -> Tensor:
    """Return float64 Gumbel noise −log(−log u), u the middle of one of 2³² steps."""
    return noise.double().add_(MIDDLE).mul_(STEP).log_().neg_().log_().neg_()


def hashes(keys: Array, positions: Array, pairs: Array) -> Array:
    """Return hashes `[R, P]` of keys `[R]`, positions `[R]` and pairs of tokens `[P]`, all int64."""
    return hash_((keys + positions * signed(POSITION_STEP))[:, None] + pairs * signed(TOKEN_STEP))


def hash_(integers: Array) -> Array:
    """Hash int64 integers in place by SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea and Flood 2014, *Fast
    splittable pseudorandom number generators*).
    """
    for shift, factor in zip((30, 27, 31), (*FACTORS, 1), strict=True):
        moved = integers >> shift
        moved &= (1 << (64 - shift)) - 1  # clear the repeated sign bits
        integers ^= moved
        if factor > 1:
            integers *= signed(factor)
    return integers


def signed(integer: int) -> int:
    return integer - (1 << 64) if integer >> 63 else integer

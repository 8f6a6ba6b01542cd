r"""Sampling with keyed Gumbel noise: the token with the largest sum of log-probability and noise.

With independent Gumbel noise for each token, the winner has the softmax's distribution (Maddison, Tarlow and Minka
2014, *A\* sampling*). Here the noise is a function of (seed, position, token). So the same seed draws the same token,
and small rounding differences change the winner only at near ties.

The noise is counter-based: seed, position and token make a counter, which is hashed. All of it is arithmetic on 64-bit
integers, which wraps around alike on every device, eager, compiled or in a graph.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter import devices

_Integers = npt.NDArray[np.int64]
Array = TypeVar("Array", Tensor, _Integers)
"""Integers on a device (PyTorch) or on the host (NumPy, which has less call overhead)."""

_POSITION_STEP, _TOKEN_STEP = 0xC13FA9A902A6328F, 0x91E10DA5C79E7B1D
"""Steps of a counter from one position and from one pair of tokens to the next: 2⁶⁴ divided by the plastic number and
by its square, which keeps counters of different (position, token) apart (Roberts 2018, *The unreasonable effectiveness
of quasirandom sequences*).
"""
_MIDDLE, _STEP = 2.0**31 + 0.5, 2.0**-32
"""Map 32-bit uniform noise to the middle of a step of the unit interval. Each token's probability is exact up to 2⁻³².
"""
_LEAST_NOISE = -math.log(-math.log(_STEP / 2))
_REACH = 8.0
"""A token at most this far below the best is a candidate whatever its noise. One farther below needs more noise than
`_REACH + _LEAST_NOISE`, which one in 130 has.
"""
_PORTION = 1 << 18
"""Tokens of all rows that are hashed together on the host, so that they stay in a core's cache."""


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
    sums = scores[row, token] - np.log(-np.log((noise[row, token] + _MIDDLE) * _STEP))
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
    return noise.double().add_(_MIDDLE).mul_(_STEP).log_().neg_().log_().neg_()


def hashes(keys: Array, positions: Array, pairs: Array) -> Array:
    """Return hashes `[R, P]` of keys `[R]`, positions `[R]` and pairs of tokens `[P]`, all int64."""
    return hash_((keys + positions * _signed(_POSITION_STEP))[:, None] + pairs * _signed(_TOKEN_STEP))


def hash_(integers: Array) -> Array:
    """Hash int64 integers in place by SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea and Flood 2014, *Fast
    splittable pseudorandom number generators*).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        moved = integers >> shift
        moved &= (1 << (64 - shift)) - 1  # clear the repeated sign bits
        integers ^= moved
        if factor > 1:
            integers *= _signed(factor)
    return integers


def _signed(integer: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    return integer - (1 << 64) if integer >> 63 else integer


_HIGH_NOISE = math.floor(math.exp(-math.exp(-_REACH - _LEAST_NOISE)) / _STEP - _MIDDLE) - 1
"""Uniform noise up to this is Gumbel noise up to `_REACH + _LEAST_NOISE`."""

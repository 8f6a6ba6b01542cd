r"""Drawing tokens with keyed Gumbel noise: the token with the largest sum of log-probability and noise.

With Gumbel noise of its own for each token, the winner has the softmax's distribution (Maddison, Tarlow and Minka
2014, *A\* sampling*). Here the noise is a function of (seed, position, token). So the same seed draws the same token,
and where rounding moves the log-probabilities a little, another token wins only where two are nearly tied.

The noise is counter-based: a counter is made of seed, position and token, and hashed. All of it is arithmetic on 64-bit
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
"""Integers on a device or on the host, where numpy takes less time to call than PyTorch."""

_POSITION_STEP, _TOKEN_STEP = 0xC13FA9A902A6328F, 0x91E10DA5C79E7B1D
"""Steps of a counter from one position and from one pair of tokens to the next. They are 2⁶⁴ divided by the plastic
number and by its square, so that counters of different (position, token) keep apart (Roberts 2018, *The unreasonable
effectiveness of quasirandom sequences*)."""
_MIDDLE, _STEP = 2.0**31 + 0.5, 2.0**-32
"""From uniform noise of 32 bits to the middle of a step of the unit interval. So a token is drawn with its probability,
but for at most 2⁻³²."""
_LEAST_NOISE = -math.log(-math.log(_STEP / 2))
_REACH = 8.0
"""How far below the best token a token may be to be looked at whatever its noise is. A token farther below needs more
noise than `_REACH + _LEAST_NOISE`, which one in 130 has."""
_PORTION = 1 << 18
"""Tokens of all rows that are hashed together on the host, so that their numbers stay in a core's cache."""


def seed_key(seed: int) -> int:
    """A seed of any size as a signed 64-bit integer; near seeds have keys that are not near."""
    digest = blake2b(seed.to_bytes(seed.bit_length() // 8 + 1, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(scores: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row: `[R]` token ids.

    Args:
        scores: `[R, V]` float64 log-probabilities up to a constant: a row's largest is 0, and -inf is never drawn.
        keys: `[R]` int64 `seed_key` of the rows' seeds.
        positions: `[R]` int64 places of the tokens in their outputs.
    """
    if devices.is_asynchronous(scores.device):
        return gumbel(noise_bits(keys, positions, scores.shape[1])).add_(scores).argmax(-1)
    numbers = (scores.numpy(), keys.numpy(), positions.numpy())
    portion = max(_PORTION // scores.shape[1], 1)
    drawn = [_draw_on_host(*(part[at : at + portion] for part in numbers)) for at in range(0, len(scores), portion)]
    return torch.from_numpy(np.concatenate(drawn))


def _draw_on_host(scores: npt.NDArray[np.float64], keys: _Integers, positions: _Integers) -> _Integers:
    """The same where the host may look at numbers: only those tokens get Gumbel noise that can win.

    The best token's sum is at least `_LEAST_NOISE`. So a token that is more than `_REACH` below it loses unless its own
    noise is above `_REACH + _LEAST_NOISE`.
    """
    rows, size = scores.shape
    noise = hashes(keys, positions, np.arange(-(-size // 2))).view(np.int32)[:, :size]
    # A row that is not finite has candidates, too. Any of them will do, as nobody will see it.
    row, token = np.divmod(np.flatnonzero(~(scores < -_REACH) | (noise > _HIGH_NOISE)), size)
    sums = scores[row, token] - np.log(-np.log((noise[row, token] + _MIDDLE) * _STEP))
    best = np.fmax.reduceat(sums, np.searchsorted(row, np.arange(rows)))
    wins = sums == best[row]
    chosen = np.zeros(rows, dtype=np.int64)
    chosen[row[wins]] = token[wins]
    return chosen


def noise_bits(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Uniform noise `[R, V]`, integers of 32 bits from −2³¹ on, of (seed, position, token).

    A pair of tokens shares a hash of 64 bits: the even one has its lower half, the odd one its upper half.

    Args:
        keys: `[R]` int64 `seed_key` of the rows' seeds.
        positions: `[R]` int64.
        vocabulary: V.
    """
    hashed = hashes(keys, positions, torch.arange(-(-vocabulary // 2), device=keys.device))
    # To view it as integers of 32 bits corrupts the memory once it is compiled (torch 2.13 on a CPU).
    return torch.stack((hashed << 32 >> 32, hashed >> 32), 2).flatten(1)[:, :vocabulary]


def gumbel(noise: Tensor) -> Tensor:
    """Float64 Gumbel noise of uniform `noise`: −log(−log u), where u is in the middle of one of 2³² steps."""
    return noise.double().add_(_MIDDLE).mul_(_STEP).log_().neg_().log_().neg_()


def hashes(keys: Array, positions: Array, pairs: Array) -> Array:
    """Hashes `[R, P]` of keys `[R]`, positions `[R]` and pairs of tokens `[P]`, all of them int64."""
    return hash_((keys + positions * _signed(_POSITION_STEP))[:, None] + pairs * _signed(_TOKEN_STEP))


def hash_(integers: Array) -> Array:
    """Hash int64 integers in place: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable
    pseudorandom number generators*), a bijection of 64 bits.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        moved = integers >> shift
        moved &= (1 << (64 - shift)) - 1  # where the sign has been repeated
        integers ^= moved
        if factor > 1:
            integers *= _signed(factor)
    return integers


def _signed(integer: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return integer - (1 << 64) if integer >> 63 else integer


_HIGH_NOISE = math.floor(math.exp(-math.exp(-_REACH - _LEAST_NOISE)) / _STEP - _MIDDLE) - 1
"""Uniform noise that is not above this is, as Gumbel noise, not above `_REACH + _LEAST_NOISE`."""

"""Drawing tokens with keyed Gumbel noise: the token with the largest sum of log-probability and noise.

With Gumbel noise of its own for each token, the winner has the softmax's distribution (Maddison, Tarlow and Minka
2014, *A\\* sampling*). Here the noise is a function of (seed, position, token). So the same seed draws the same token,
and where rounding moves the log-probabilities a little, another token wins only where two are nearly tied.

The noise is counter-based: a counter is made of seed, position and token, and hashed. All of it is arithmetic on 64-bit
integers, which wraps around alike on every device, eager, compiled or in a graph.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from drafter import devices

_POSITION_STEP, _TOKEN_STEP = 0xC13FA9A902A6328F, 0x91E10DA5C79E7B1D
"""Steps of a counter from one position and from one pair of tokens to the next. They are 2⁶⁴ divided by the plastic
number and by its square, so that counters of different (position, token) keep apart (Roberts 2018, *The unreasonable
effectiveness of quasirandom sequences*)."""
_BITS = 32
"""Bits of the noise: a token is drawn with its probability but for at most 2⁻³²."""
_LEAST_NOISE = -math.log((_BITS + 1) * math.log(2))
_REACH = 8.0
"""How far below the best token a token may be to be looked at whatever its noise is. A token farther below needs more
noise than `_REACH + _LEAST_NOISE`, which one in 130 has."""


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
    noise = noise_bits(keys, positions, scores.shape[1])
    if devices.is_asynchronous(scores.device):
        return gumbel(noise).add_(scores).argmax(-1)
    return _draw_on_host(scores, noise)


def _draw_on_host(scores: Tensor, noise: Tensor) -> Tensor:
    """The same where the host may look at numbers: only those tokens get noise that can win.

    The best token's sum is at least `_LEAST_NOISE`. So a token that is more than `_REACH` below it loses unless its own
    noise is above `_REACH + _LEAST_NOISE`.
    """
    size = scores.shape[1]
    # A row that is not finite has candidates, too. Any of them will do, as nobody will see it.
    able = np.flatnonzero(~(scores.numpy() < -_REACH) | (noise.numpy() > _HIGH_NOISE))
    rows, tokens = np.divmod(able, size)
    places = torch.from_numpy(able)
    sums = (scores.take(places) + gumbel(noise.take(places))).numpy()
    best = np.fmax.reduceat(sums, np.searchsorted(rows, np.arange(len(scores))))
    wins = sums == best[rows]
    chosen = np.zeros(len(scores), dtype=np.int64)
    chosen[rows[wins]] = tokens[wins]
    return torch.from_numpy(chosen)


def noise_bits(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Uniform noise `[R, V]`, int32 from −2³¹ on, of (seed, position, token).

    A pair of tokens shares a hash of 64 bits: the even one has its lower half, the odd one its upper half.

    Args:
        keys: `[R]` int64 `seed_key` of the rows' seeds.
        positions: `[R]` int64.
        vocabulary: V.
    """
    pairs = torch.arange(-(-vocabulary // 2), device=keys.device) * _signed(_TOKEN_STEP)
    counters = (keys + positions * _signed(_POSITION_STEP))[:, None] + pairs
    return hash_(counters).view(torch.int32)[:, :vocabulary]


def hash_(counters: Tensor) -> Tensor:
    """Hash int64 integers in place: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable
    pseudorandom number generators*), a bijection of 64 bits.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        counters.bitwise_xor_(_right(counters, shift)).mul_(_signed(factor))
    return counters.bitwise_xor_(_right(counters, 31))


def gumbel(noise: Tensor) -> Tensor:
    """Float64 Gumbel noise of uniform int32 `noise`: −log(−log u), where u is in the middle of one of 2³² steps."""
    return noise.double().add_(2 ** (_BITS - 1) + 0.5).mul_(2.0**-_BITS).log_().neg_().log_().neg_()


def _right(integers: Tensor, shift: int) -> Tensor:
    """Shift int64 integers to the right, and zeros in: PyTorch's own shift repeats the sign."""
    return (integers >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(integer: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return integer - (1 << 64) if integer >> 63 else integer


_HIGH_NOISE = math.floor(math.exp(-math.exp(-_REACH - _LEAST_NOISE)) * 2**_BITS) - 2 ** (_BITS - 1) - 2
"""Uniform noise that is not above this is, as Gumbel noise, not above `_REACH + _LEAST_NOISE`."""

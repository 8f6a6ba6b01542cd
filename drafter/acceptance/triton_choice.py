"""The choice of tokens on a GPU in two kernels, token for token what `drafter.acceptance.choices` does by PyTorch.

`scores` makes of logits what may be chosen: biases, penalties, limits and a guide's mask, in one pass. `choose` finds
the thresholds of top-k and top-p by bisection over a row that stays in the GPU's second-level cache, and draws.
Everything is in float64 and in int64, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.acceptance.sampling import FACTORS, MASS_BITS, MIDDLE, POSITION_STEP, STEP, TOKEN_STEP, History, signed

_PORTION, _PORTION_WARPS = 1024, 4  # tokens of a program of `_score`
_BLOCK, _WARPS = 4096, 16  # tokens that a program of `_choose`, which has a whole row, holds at a time
_MOST = tl.constexpr(2**63 - 1)
_MIDDLE, _STEP = tl.constexpr(MIDDLE), tl.constexpr(STEP)
_TOKEN_STEP = tl.constexpr(signed(TOKEN_STEP))
_FIRST, _SECOND = tl.constexpr(signed(FACTORS[0])), tl.constexpr(signed(FACTORS[1]))


@dataclass(frozen=True)
class Penalties:
    """What `penalise` needs for R rows: the counts of `history`, and the three penalties `[R]` float64."""

    history: History
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True)
class Draw:
    """How R rows draw, all `[R]`; a row of temperature 0 takes the token with the largest score.

    Args:
        top_k: int64, 0 keeps all.
        keys: int64, of the rows' seeds; see `draw`.
        positions: int64, of the tokens in their outputs.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    positions: Tensor


def scores(
    logits: Tensor,
    rows: Tensor,
    nodes: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    penalties: Penalties | None = None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return what may be chosen after node `nodes` `[R]` of each of `rows` `[R]`, `[R, V]` float64, -inf elsewhere.

    Args:
        logits: `[B, N, V]`.
        biases: Tokens `[R, K]` int64 and what is added to them, float64.
        forbidden: Tokens `[R, F]` int64 that may not be chosen, V for none; and those that may, `[R, V]` bool, or
            `[R, 0]` where all may.
        allowed: `[B, N, ceil(V / 32)]` int32, a guide's mask; see `NodeChoices`.
    """
    size, found = logits.shape[-1], torch.empty(len(rows), logits.shape[-1], dtype=torch.float64, device=logits.device)
    none = found  # stands for what a stage that is left out would read
    tokens, added = biases if biases is not None else (none[:, :0], none[:, :0])
    banned, may = forbidden if forbidden is not None else (none[:, :0], none[:, :0])
    if penalties is not None:
        history = penalties.history
        counts = (history.seen, history.said, history.tokens, history.ancestors, history.real, history.in_output)
        settings = (penalties.repetition, penalties.frequency, penalties.presence)
    else:
        counts, settings = (none,) * 6, (none,) * 3
    _score[(len(rows), triton.cdiv(size, _PORTION))](
        logits.contiguous(), found, rows, nodes, tokens.contiguous(), added.contiguous(), *counts, *settings,
        banned.contiguous(), may.contiguous(), none if allowed is None else allowed.contiguous(),
        size, logits.shape[1], tokens.shape[1], banned.shape[1], -(-size // 32),
        penalties is not None, may.shape[1] > 0, allowed is not None, _PORTION, num_warps=_PORTION_WARPS,
    )  # fmt: skip
    return found


def choose(scores: Tensor, draw: Draw) -> Tensor:
    """Return the tokens `[R]` int64 that rows draw from `scores` `[R, V]` float64."""
    size, chosen = scores.shape[-1], torch.empty(len(scores), dtype=torch.long, device=scores.device)
    scale = 2.0 ** (MASS_BITS - size.bit_length())
    starts = draw.keys + draw.positions * signed(POSITION_STEP)
    settings = (draw.temperature, draw.top_k, draw.top_p, draw.min_p.log(), starts)
    _choose[(len(scores),)](scores, chosen, *settings, size, scale, _BLOCK, num_warps=_WARPS)
    return chosen


@triton.jit
def _score(
    logits, found, rows, nodes, biased, biases, seen, said, tree_tokens, ancestors, real, in_output,
    repetition, frequency, presence, banned, may, allowed, size, tree_size, num_biases, num_banned, num_words,
    penalised: tl.constexpr, listed: tl.constexpr, guided: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    inside = token < size
    row, node = tl.load(rows + index), tl.load(nodes + index)
    at_node = row * tree_size + node
    score = tl.load(logits + at_node * size + token, inside, 0.0).to(tl.float64)
    entry = 0
    while entry < num_biases:
        place = index * num_biases + entry
        score += tl.where(token == tl.load(biased + place), tl.load(biases + place), 0.0)
        entry += 1
    if penalised:
        seen_before = tl.load(seen + row * size + token, inside, 0.0)
        said_before = tl.load(said + row * size + token, inside, 0.0)
        entry = 0
        while entry < tree_size:
            place = row * tree_size + entry
            here = (token == tl.load(tree_tokens + place)) & tl.load(ancestors + at_node * tree_size + entry).to(
                tl.int1
            )
            seen_before += (here & tl.load(real + place).to(tl.int1)).to(tl.float64)
            said_before += (here & tl.load(in_output + place).to(tl.int1)).to(tl.float64)
            entry += 1
        factor = tl.load(repetition + index)
        repeated = tl.where(score < 0, score * factor, score / factor)
        said_often = tl.load(frequency + index) * said_before
        said_at_all = tl.load(presence + index) * (said_before > 0).to(tl.float64)
        score = tl.where(seen_before > 0, repeated, score) - (said_often + said_at_all)
    entry = 0
    while entry < num_banned:
        score = tl.where(token == tl.load(banned + index * num_banned + entry), -float("inf"), score)
        entry += 1
    if listed:
        score = tl.where(tl.load(may + index * size + token, inside, 0) != 0, score, -float("inf"))
    if guided:
        word = tl.load(allowed + at_node * num_words + token // 32, inside, 0)
        score = tl.where((word >> (token % 32)) & 1 != 0, score, -float("inf"))
    tl.store(found + index * size + token, score, inside)


@triton.jit
def _choose(
    scores, chosen, temperatures, top_ks, top_ps, log_min_ps, starts, size: tl.constexpr, scale, block: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = scores + index * size
    best, chosen_token = tl.load(row), tl.zeros((), tl.int32)
    for begin in range(0, size, block):
        token = begin + tl.arange(0, block)
        score = tl.load(row + token, token < size, -float("inf"))
        block_best = tl.max(score, 0)
        first = tl.min(tl.where(score == block_best, token, size), 0)
        chosen_token = tl.where(block_best > best, first, chosen_token)
        best = tl.where(block_best > best, block_best, best)
    temperature = tl.load(temperatures + index)
    if temperature > 0:
        everything = tl.full((), _MOST, tl.int64)
        furthest = everything
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        if (top_k > 0) & (top_k < size):
            furthest = _least_reaching(row, size, best, temperature, scale, top_k, everything, False, block)
        if top_p < 1:
            total = tl.zeros((), tl.int64)
            for begin in range(0, size, block):
                score, below = _tempered(row, begin, size, best, temperature, block)
                total += tl.sum(tl.where(below <= furthest, (tl.exp(score) * scale).to(tl.int64), 0), 0)
            wanted = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
            furthest = _least_reaching(row, size, best, temperature, scale, wanted, furthest, True, block)
        floor, start = tl.load(log_min_ps + index), tl.load(starts + index)
        # A row that is not a number draws token 0, which is discarded.
        chosen_token, largest = tl.zeros((), tl.int32), tl.full((), -float("inf"), tl.float64)
        for begin in range(0, size, block):
            score, below = _tempered(row, begin, size, best, temperature, block)
            token = begin + tl.arange(0, block)
            noisy = tl.where((below <= furthest) & (score >= floor), score + _gumbel(start, token), -float("inf"))
            block_largest = tl.max(noisy, 0)
            first = tl.min(tl.where(noisy == block_largest, token, size), 0)
            chosen_token = tl.where(block_largest > largest, first, chosen_token)
            largest = tl.where(block_largest > largest, block_largest, largest)
    tl.store(chosen + index, chosen_token.to(tl.int64))


@triton.jit
def _tempered(row, begin, size, best, temperature, block: tl.constexpr):
    """Return a block's scores after temperature, the best of the row 0, and how far below it they are.

    Among numbers that are not negative the bits have the order of the numbers. A place past the row is at the end.
    """
    token = begin + tl.arange(0, block)
    score = (tl.load(row + token, token < size, -float("inf")) - best) / temperature
    return score, tl.where(token < size, tl.abs(score).to(tl.int64, bitcast=True), _MOST)


@triton.jit
def _least_reaching(
    row, size: tl.constexpr, best, temperature, scale, wanted, most, weighed: tl.constexpr, block: tl.constexpr
):
    """Return the least distance `below` the best such that the tokens up to it have the wanted weight.

    A token weighs 1, or its mass, and nothing if it is farther than `most`. Each bound moves to a token's own distance,
    so the search ends when no token is left between the two.
    """
    low, high = tl.zeros((), tl.int64), most
    while low < high:
        middle = low + (high - low) // 2
        reached, last, following = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.full((), _MOST, tl.int64)
        for begin in range(0, size, block):
            score, below = _tempered(row, begin, size, best, temperature, block)
            near = below <= middle
            weight = (tl.exp(score) * scale).to(tl.int64) if weighed else tl.full((block,), 1, tl.int64)
            reached += tl.sum(tl.where(near, weight, 0), 0)
            last = tl.maximum(last, tl.max(tl.where(near, below, 0), 0))
            following = tl.minimum(following, tl.min(tl.where(near, _MOST, below), 0))
        if reached >= wanted:
            high = last
        else:
            low = following
    return low


@triton.jit
def _gumbel(start, token):
    """Return the noise of tokens; `drafter.acceptance.sampling` has the same, and says why."""
    hashed = start + (token // 2).to(tl.int64) * _TOKEN_STEP
    hashed = (hashed ^ ((hashed >> 30) & 0x3FFFFFFFF)) * _FIRST
    hashed = (hashed ^ ((hashed >> 27) & 0x1FFFFFFFFF)) * _SECOND
    hashed = hashed ^ ((hashed >> 31) & 0x1FFFFFFFF)
    bits = tl.where(token % 2 == 0, hashed << 32, hashed) >> 32
    return -tl.log(-tl.log((bits.to(tl.float64) + _MIDDLE) * _STEP))

"""Losses over draft frames, by the recursions of `drafter.ctc.trie` in log space.

All of them look at the columns of the labels and of the blank only, cost `T` small steps, and are differentiable.
A prefix that the frames cannot reach (`u` labels need `u` frames, and one more for each adjacent repeat) is masked,
not priced: single unreachable prefixes would swamp the rest.

Losses are returned as a sum and its weight, so that data-parallel workers can divide by the weight of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IMPOSSIBLE = -1e30
"""Log-probability of what cannot be. Finite, because the gradient of `logaddexp(-inf, -inf)` is NaN."""


@dataclass(frozen=True)
class LossSum:
    """A sum of weighted terms.

    Args:
        total: Scalar, in nats, differentiable.
        weight: Scalar, the sum of the weights of the terms that counted.
    """

    total: Tensor
    weight: Tensor

    def mean(self) -> Tensor:
        """Weighted mean in nats; 0 where nothing counted."""
        return self.total / self.weight.clamp_min(1e-9)


def reachable(targets: Tensor, lengths: Tensor, frames: int) -> Tensor:
    """Which target prefixes CTC can spell: `[N, U]` bool, of `targets` `[N, U]` with `lengths` `[N]` valid labels."""
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    repeats = _repeats(targets).long().cumsum(1)
    return (position <= lengths[:, None]) & (position + repeats <= frames)


def ctc_loss(log_probs: Tensor, targets: Tensor, lengths: Tensor) -> tuple[LossSum, Tensor]:
    """The paper's loss, `−log P(Y|X)`: the frames collapse to exactly the target (Graves et al. 2006).

    Args:
        log_probs: `[N, T, V + 1]`, blank last.
        targets: `[N, U]` labels; any valid id after a row's last.
        lengths: `[N]` valid labels.

    Returns:
        The sum over rows, of weight 1 each, and `masked` `[N]` bool: rows without a target or that need more than
        `T` frames. They do not count.
    """
    frames, labels = log_probs.shape[1], targets.shape[1]
    position = torch.arange(1, labels + 1, device=targets.device)
    spelt = torch.where(position <= lengths[:, None], reachable(targets, lengths, frames), True).all(1)
    counted = spelt & (lengths > 0)
    _, ends = _recursion(log_probs, targets)
    complete = ends.gather(1, lengths[:, None])[:, 0]
    return LossSum(-torch.where(counted, complete, 0.0).sum(), counted.sum().to(log_probs.dtype)), ~counted


def prefix_loss(log_probs: Tensor, targets: Tensor, lengths: Tensor, decay: float = 0.8) -> LossSum:
    """`−Σ_u decay^u · log(π(y_1..u) / π(y_1..u−1))`: what decides a walk is the prefix probability.

    With no blanks it is depth-weighted cross-entropy.

    Args:
        log_probs: `[N, T, V + 1]`, blank last.
        targets: `[N, U]` labels; any valid id after a row's last.
        lengths: `[N]` valid labels.
        decay: Weight of a label, relative to the one before.
    """
    prefixes, _ = _recursion(log_probs, targets)
    return _conditional(prefixes, reachable(targets, lengths, log_probs.shape[1]), decay)


def lattice_prefix_loss(emit: Tensor, blank: Tensor, lengths: Tensor, frames: int, decay: float = 0.8) -> LossSum:
    """`prefix_loss` for frames that know the last labels (`best_lattice_trie`), within a band.

    Entry `[n, u, i]` (from 0) belongs to frame `u + 1 + i`, with `u` labels said before it.

    Args:
        emit: `[N, U, B]` log-probability that the frame says label `u + 1`.
        blank: `[N, U, B]` log-probability that it says nothing.
        lengths: `[N]` valid labels.
        frames: T; entries of frames beyond it do not count.
        decay: As in `prefix_loss`.
    """
    prefixes = lattice_prefixes(emit, blank, frames)
    position = torch.arange(1, emit.shape[1] + 1, device=emit.device)
    return _conditional(prefixes, (position <= lengths[:, None]) & (position <= frames), decay)


def lattice_prefixes(emit: Tensor, blank: Tensor, frames: int) -> Tensor:
    """`log π` of each target prefix `[N, U]`; arguments as in `lattice_prefix_loss`."""
    count, labels, band = emit.shape
    frame = torch.arange(labels, device=emit.device)[:, None] + torch.arange(1, band + 1, device=emit.device)
    emit = emit.masked_fill(frame > frames, IMPOSSIBLE)
    arrival = torch.cat([emit.new_zeros(count, 1), emit.new_full((count, band - 1), IMPOSSIBLE)], 1)
    prefixes = []
    for u in range(labels):
        # mass[i]: u labels said by frame u + i.
        mass = [arrival[:, 0]]
        for i in range(1, band):
            mass.append(torch.logaddexp(arrival[:, i], mass[-1] + blank[:, u, i - 1]))
        arrival = torch.stack(mass, 1) + emit[:, u]
        prefixes.append(arrival.logsumexp(1))
    return torch.stack(prefixes, 1)


def _repeats(targets: Tensor) -> Tensor:
    """`[N, U]` bool: the label equals the one before it."""
    same = targets[:, 1:] == targets[:, :-1]
    return torch.cat([torch.zeros_like(targets[:, :1], dtype=torch.bool), same], 1)


def _recursion(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each target prefix: `log π` `[N, U]`, and of collapsing to exactly it `[N, U + 1]`, the empty one first."""
    count, frames, symbols = log_probs.shape
    said = log_probs.gather(2, targets[:, None].expand(-1, frames, -1))
    silent = log_probs[:, :, symbols - 1]
    barred = torch.where(_repeats(targets), IMPOSSIBLE, 0.0)
    # Column u: the frames so far collapse to u labels and end in the last of them (n), or in a blank (b).
    never = said.new_full((count, 1), IMPOSSIBLE)
    b = torch.cat([torch.zeros_like(never), never.expand(-1, targets.shape[1])], 1)
    n = never.expand(-1, targets.shape[1] + 1)
    arrivals = []
    for j in range(frames):
        first = said[:, j] + torch.logaddexp(b[:, :-1], n[:, :-1] + barred)
        b = silent[:, j, None] + torch.logaddexp(b, n)
        n = torch.cat([never, torch.logaddexp(first, said[:, j] + n[:, 1:])], 1)
        arrivals.append(first)
    return torch.stack(arrivals).logsumexp(0), torch.logaddexp(b, n)


def _conditional(prefixes: Tensor, counted: Tensor, decay: float) -> LossSum:
    """Weighted `−log π_u / π_{u−1}` over the prefixes that count; these are the first ones of each row."""
    prefixes = torch.where(counted, prefixes, 0.0)
    before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], 1)
    depth = torch.arange(prefixes.shape[1], device=prefixes.device, dtype=prefixes.dtype)
    weights = counted * decay**depth
    return LossSum(-(weights * (prefixes - before)).sum(), weights.sum())

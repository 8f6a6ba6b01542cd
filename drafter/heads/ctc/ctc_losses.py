"""Losses over draft frames, by the recursions of `drafter.search.ctc_prefix` in log space.

All of them look at the columns of the labels and of the blank only, cost `T` small steps, and are differentiable.
A prefix that the frames cannot reach (`u` labels need `u` frames, and one more for each adjacent repeat) is masked,
not priced: single unreachable prefixes would swamp the rest.

With labels `v_k` of weight `q_k` instead of one target, a term `log(π(y_1..u) / π(y_1..u−1))` of the prefix losses
becomes `Σ_k q_k log(π(y_1..u−1, v_k) / π(y_1..u−1))`: what should follow the text that is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.heads.losses import Labels, LossSum, hard_labels

IMPOSSIBLE = -1e30
"""Log-probability of what cannot be. Finite, because the gradient of `logaddexp(-inf, -inf)` is NaN."""


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
    n, b, _ = _recursion(log_probs, targets)
    complete = torch.logaddexp(b[:, -1], n[:, -1]).gather(1, lengths[:, None])[:, 0]
    return LossSum(-torch.where(counted, complete, 0.0).sum(), counted.sum().to(log_probs.dtype)), ~counted


def prefix_loss(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, decay: float = 0.8, labels: Labels | None = None
) -> LossSum:
    """`−Σ_u decay^u · log(π(y_1..u) / π(y_1..u−1))`: what decides a walk is the prefix probability.

    With no blanks it is depth-weighted cross-entropy.

    Args:
        log_probs: `[N, T, V + 1]`, blank last.
        targets: `[N, U]` the text; any valid id after a row's last.
        lengths: `[N]` valid targets.
        decay: Weight of a place, relative to the one before.
        labels: `[N, U, K]` what should be said after each prefix of the text; None is the text itself.
    """
    frames = log_probs.shape[1]
    labels = labels or hard_labels(targets)
    n, b, prefixes = _recursion(log_probs, targets)
    before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], 1)
    spelt = torch.cat([lengths[:, None] > 0, reachable(targets, lengths, frames)[:, :-1]], 1)
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    spelt = spelt & (position <= lengths[:, None])

    # Each label arrives at any frame; after its own like only where a blank has been.
    last = torch.cat([torch.full_like(targets[:, :1], -1), targets[:, :-1]], 1)[:, :, None]
    again = labels.tokens == last
    waiting = torch.where(again[:, None], b[:, :-1, :-1, None], torch.logaddexp(b, n)[:, :-1, :-1, None])
    index = labels.tokens.flatten(1)[:, None].expand(-1, frames, -1)
    said = log_probs.gather(2, index).view(waiting.shape)
    scores = (waiting + said).logsumexp(1)
    repeats = _repeats(targets).long()
    needed = (position + repeats.cumsum(1) - repeats)[:, :, None] + again
    return _conditional(scores, before, spelt, needed <= frames, labels.probs, decay)


def lattice_prefix_loss(
    emit: Tensor,
    blank: Tensor,
    lengths: Tensor,
    frames: int,
    decay: float = 0.8,
    choices: tuple[Tensor, Tensor] | None = None,
) -> LossSum:
    """`prefix_loss` for frames that know the last labels (`best_lattice_trie`), within a band.

    Entry `[n, u, i]` (from 0) belongs to frame `u + 1 + i`, with `u` labels said before it.

    Args:
        emit: `[N, U, B]` log-probability that the frame says label `u + 1` of the text.
        blank: `[N, U, B]` log-probability that it says nothing.
        lengths: `[N]` valid labels.
        frames: T; entries of frames beyond it do not count.
        decay: As in `prefix_loss`.
        choices: What should be said there, where that is not the text itself: log-probabilities `[N, U, B, K]` that
            the frame says each label, and the labels' weights `[N, U, K]`.
    """
    masses, prefixes = lattice_prefixes(emit, blank, frames)
    scores, probs = prefixes[..., None], torch.ones_like(prefixes)[..., None]
    if choices is not None:
        said, probs = choices
        scores = (masses + _in_time(emit, frames))[..., None] + said
        scores = scores.logsumexp(2)
    before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], 1)
    position = torch.arange(1, emit.shape[1] + 1, device=emit.device)
    spelt = (position <= lengths[:, None]) & (position <= frames)
    return _conditional(scores, before, spelt, torch.ones_like(probs, dtype=torch.bool), probs, decay)


def lattice_prefixes(emit: Tensor, blank: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Arguments as in `lattice_prefix_loss`.

    Returns:
        `[N, U, B]`: log-probability that exactly `u` labels of the text were said before frame `u + 1 + i`; and
        `[N, U]`: `log π` of each prefix of the text.
    """
    count, labels, band = emit.shape
    emit = emit + _in_time(emit, frames)
    arrival = torch.cat([emit.new_zeros(count, 1), emit.new_full((count, band - 1), IMPOSSIBLE)], 1)
    masses, prefixes = [], []
    for u in range(labels):
        mass = [arrival[:, 0]]
        for i in range(1, band):
            mass.append(torch.logaddexp(arrival[:, i], mass[-1] + blank[:, u, i - 1]))
        masses.append(torch.stack(mass, 1))
        arrival = masses[-1] + emit[:, u]
        prefixes.append(arrival.logsumexp(1))
    return torch.stack(masses, 1), torch.stack(prefixes, 1)


def _in_time(emit: Tensor, frames: int) -> Tensor:
    """`[U, B]`: 0 for entries of frames that exist, `IMPOSSIBLE` beyond."""
    _, labels, band = emit.shape
    frame = torch.arange(labels, device=emit.device)[:, None] + torch.arange(1, band + 1, device=emit.device)
    return torch.where(frame > frames, IMPOSSIBLE, 0.0)


def _repeats(targets: Tensor) -> Tensor:
    """`[N, U]` bool: the label equals the one before it."""
    same = targets[:, 1:] == targets[:, :-1]
    return torch.cat([torch.zeros_like(targets[:, :1], dtype=torch.bool), same], 1)


def _recursion(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each frame and after the last, and the prefixes of the text.

    Returns:
        n, b: `[N, T + 1, U + 1]` log-probability that the frames so far collapse to the first `u` labels and end in the
        last of them (n) or in a blank (b); and `[N, U]` `log π` of each prefix.
    """
    count, frames, symbols = log_probs.shape
    said = log_probs.gather(2, targets[:, None].expand(-1, frames, -1))
    silent = log_probs[:, :, symbols - 1]
    barred = torch.where(_repeats(targets), IMPOSSIBLE, 0.0)
    never = said.new_full((count, 1), IMPOSSIBLE)
    b = torch.cat([torch.zeros_like(never), never.expand(-1, targets.shape[1])], 1)
    n = never.expand(-1, targets.shape[1] + 1)
    ns, bs, arrivals = [n], [b], []
    for j in range(frames):
        first = said[:, j] + torch.logaddexp(b[:, :-1], n[:, :-1] + barred)
        b = silent[:, j, None] + torch.logaddexp(b, n)
        n = torch.cat([never, torch.logaddexp(first, said[:, j] + n[:, 1:])], 1)
        arrivals.append(first)
        ns.append(n)
        bs.append(b)
    return torch.stack(ns, 1), torch.stack(bs, 1), torch.stack(arrivals).logsumexp(0)


def _conditional(
    scores: Tensor, before: Tensor, spelt: Tensor, possible: Tensor, probs: Tensor, decay: float
) -> LossSum:
    """Weighted `−Σ_k q_k (log π_k − log π_before)`, over what can be said after prefixes that can be said.

    Args:
        scores: `[N, U, K]` log prefix probability of each label.
        before: `[N, U]` of the text before it.
        spelt: `[N, U]` bool: the place counts.
        possible: `[N, U, K]` bool: the label can be reached.
        probs: `[N, U, K]` weights of the labels.
        decay: Weight of a place, relative to the one before.
    """
    counted = spelt[..., None] & possible
    probs = probs * counted
    terms = torch.where(counted, scores - before[..., None], 0.0)
    depth = torch.arange(scores.shape[1], device=scores.device, dtype=scores.dtype)
    weights = (decay**depth)[:, None] * probs
    return LossSum(-(weights * terms).sum(), weights.sum())

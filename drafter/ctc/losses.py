"""Losses over draft frames, by the recursions of `drafter.ctc.prefix_search` in log space.

They read only the columns of the labels and of the blank, and are differentiable. A prefix that the frames cannot reach
is masked: `u` labels need `u` frames, and one more for each adjacent repeat. Without the mask, a single unreachable
prefix would swamp the loss.

With labels `v_k` of weight `q_k` instead of one target, a term `log(π(y_1..u) / π(y_1..u−1))` of the prefix losses
becomes `Σ_k q_k log(π(y_1..u−1, v_k) / π(y_1..u−1))`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.heads.losses import Labels, LossSum, hard_labels

IMPOSSIBLE = -1e30
"""Stands for log 0. Finite, because the gradient of `logaddexp(-inf, -inf)` is NaN."""


def reachable(targets: Tensor, lengths: Tensor, frames: int) -> Tensor:
    """Return whether CTC can emit each prefix of `targets` `[N, U]` of `lengths` `[N]` in `frames`, `[N, U]` bool."""
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    repeats = _repeats(targets).long().cumsum(1)
    return (position <= lengths[:, None]) & (position + repeats <= frames)


def ctc_loss(log_probs: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
    """Return the CTC loss `−log P(Y|X)`: the frames collapse to exactly the target (Graves et al. 2006).

    `log_probs` are `[N, T, V + 1]`, blank last, and `targets` `[N, U]` have any valid id past a row's `lengths` `[N]`.
    Each row has weight 1, or 0 if it has no target or needs more than `T` frames.
    """
    frames, labels = log_probs.shape[1], targets.shape[1]
    position = torch.arange(1, labels + 1, device=targets.device)
    reached = torch.where(position <= lengths[:, None], reachable(targets, lengths, frames), True).all(1)
    counted = reached & (lengths > 0)
    n, b, _ = _recursion(log_probs, targets)
    complete = torch.logaddexp(b[:, -1], n[:, -1]).gather(1, lengths[:, None])[:, 0]
    return LossSum(-torch.where(counted, complete, 0.0).sum(), counted.sum().to(log_probs.dtype))


def prefix_loss(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, decay: float = 0.8, labels: Labels | None = None
) -> LossSum:
    """Return `−Σ_u decay^u · log(π(y_1..u) / π(y_1..u−1))`.

    A token is accepted only with the whole prefix before it, hence prefix probabilities. Without blanks this is
    depth-weighted cross-entropy.

    Args:
        log_probs: `[N, T, V + 1]`, blank last.
        targets: `[N, U]` the text; any valid id past a row's length.
        lengths: `[N]` number of valid targets.
        labels: `[N, U, K]` what should follow each prefix of the text; None for the text itself.
    """
    frames = log_probs.shape[1]
    labels = labels or hard_labels(targets)
    n, b, prefixes = _recursion(log_probs, targets)
    reached = torch.cat([lengths[:, None] > 0, reachable(targets, lengths, frames)[:, :-1]], 1)
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    reached = reached & (position <= lengths[:, None])

    # A label may arrive at any frame. After the same label it arrives only through a blank.
    last = torch.cat([torch.full_like(targets[:, :1], -1), targets[:, :-1]], 1)[:, :, None]
    again = labels.tokens == last
    waiting = torch.where(again[:, None], b[:, :-1, :-1, None], torch.logaddexp(b, n)[:, :-1, :-1, None])
    index = labels.tokens.flatten(1)[:, None].expand(-1, frames, -1)
    emit = log_probs.gather(2, index).view(waiting.shape)
    scores = (waiting + emit).logsumexp(1)
    repeats = _repeats(targets).long()
    needed = (position + repeats.cumsum(1) - repeats)[:, :, None] + again
    return _conditional(scores, prefixes, reached[..., None] & (needed <= frames), labels.probs, decay)


def lattice_prefix_loss(
    emit: Tensor,
    blank: Tensor,
    lengths: Tensor,
    frames: int,
    choices: tuple[Tensor, Tensor],
    decay: float = 0.8,
) -> LossSum:
    """Return `prefix_loss` for frames with a label context (`best_lattice_trie`), within a band.

    Entry `[n, u, i]` (from 0) belongs to frame `u + 1 + i`, before which `u` labels were emitted.

    Args:
        emit: `[N, U, B]` log-probability that the frame emits label `u + 1` of the text.
        blank: `[N, U, B]` log-probability that it emits a blank.
        frames: T; entries of frames beyond it do not count.
        choices: Log-probabilities `[N, U, B, K]` that the frame emits each label, and weights `[N, U, K]`.
    """
    masses, prefixes = lattice_prefixes(emit, blank, frames)
    label_emit, probs = choices
    scores = ((masses + _in_time(emit, frames))[..., None] + label_emit).logsumexp(2)
    position = torch.arange(1, emit.shape[1] + 1, device=emit.device)
    reached = (position <= lengths[:, None]) & (position <= frames)
    return _conditional(scores, prefixes, reached[..., None], probs, decay)


def lattice_prefixes(emit: Tensor, blank: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Run the recursion of `best_lattice_trie` along a text, with the arguments of `lattice_prefix_loss`.

    Return the log-probability `[N, U, B]` that exactly `u` labels of the text were emitted before frame `u + 1 + i`,
    and `log π` `[N, U]` of each prefix of the text.
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
    """Return `[U, B]`, 0 for entries of frames that exist and `IMPOSSIBLE` for others."""
    _, labels, band = emit.shape
    frame = torch.arange(labels, device=emit.device)[:, None] + torch.arange(1, band + 1, device=emit.device)
    return torch.where(frame > frames, IMPOSSIBLE, 0.0)


def _repeats(targets: Tensor) -> Tensor:
    """Return whether each label equals the label before it, `[N, U]` bool."""
    same = targets[:, 1:] == targets[:, :-1]
    return torch.cat([torch.zeros_like(targets[:, :1], dtype=torch.bool), same], 1)


def _recursion(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recursion of `drafter.ctc.prefix_search` along a text.

    Return `n` and `b` `[N, T + 1, U + 1]`, before each frame and after the last: log-probability that the frames so far
    collapse to the first `u` labels and end in the last of them (`n`) or in a blank (`b`). And `log π` `[N, U]` of each
    prefix of the text.
    """
    count, frames, symbols = log_probs.shape
    emit = log_probs.gather(2, targets[:, None].expand(-1, frames, -1))
    blank = log_probs[:, :, symbols - 1]
    barred = torch.where(_repeats(targets), IMPOSSIBLE, 0.0)
    never = emit.new_full((count, 1), IMPOSSIBLE)
    b = torch.cat([torch.zeros_like(never), never.expand(-1, targets.shape[1])], 1)
    n = never.expand(-1, targets.shape[1] + 1)
    ns, bs, arrivals = [n], [b], []
    for j in range(frames):
        first = emit[:, j] + torch.logaddexp(b[:, :-1], n[:, :-1] + barred)
        b = blank[:, j, None] + torch.logaddexp(b, n)
        n = torch.cat([never, torch.logaddexp(first, emit[:, j] + n[:, 1:])], 1)
        arrivals.append(first)
        ns.append(n)
        bs.append(b)
    return torch.stack(ns, 1), torch.stack(bs, 1), torch.stack(arrivals).logsumexp(0)


def _conditional(scores: Tensor, prefixes: Tensor, counted: Tensor, probs: Tensor, decay: float) -> LossSum:
    """Return `−Σ_k q_k (log π_k − log π_before)`, weighted by depth, over the `counted` `[N, U, K]` labels.

    `scores` `[N, U, K]` are log prefix probabilities of the text before a position with each label after it, `prefixes`
    `[N, U]` those of the text with its own.
    """
    before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], 1)
    terms = torch.where(counted, scores - before[..., None], 0.0)
    depth = torch.arange(scores.shape[1], device=scores.device, dtype=scores.dtype)
    weights = (decay**depth)[:, None] * probs * counted
    return LossSum(-(weights * terms).sum(), weights.sum())

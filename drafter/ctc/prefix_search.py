"""The exact best trie under CTC frames.

For a prefix `y_1..y_u` and frames `1..T` (Graves et al. 2006, prefix search):

    f_u(j) = p_j(y_u) · (b_{u-1}(j-1) + [y_u ≠ y_{u-1}] · n_{u-1}(j-1))     first arrival at y_u
    n_u(j) = f_u(j) + p_j(y_u) · n_u(j-1)                                    frame j emits y_u
    b_u(j) = p_j(ε) · (b_u(j-1) + n_u(j-1))                                  frame j emits a blank
    π(y_1..y_u) = Σ_j f_u(j)                                                 prefix probability

`π` never grows when a prefix is extended. So the `N - 1` most probable prefixes form a trie, and no other trie of `N`
nodes has a larger sum of `π`, the expected acceptance length under the frames' distributions. A level-synchronous beam
finds this trie exactly: a node at depth `u` has `u - 1` ancestors below the root, so the trie has at most `N - u` nodes
of that depth.

The recursion over frames is linear. With `s = b_{u-1}` or `b_{u-1} + n_{u-1}`, whichever the rule picks,
`n_u = s · L(y_u)` and `b_u = n_u · M`, where `L(y)[i, j] = Π_{i<m≤j} p_m(y)` and `M[i, j] = Π_{i<m≤j} p_m(ε)`.
So one depth is two small matrix products and one `topk`, for all rows, nodes and frames at once.

Probabilities are multiplied, not added as logarithms: over a few frames nothing that matters underflows. A prefix less
probable than float32 can hold (1e-38) counts as impossible.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from drafter.tree.token_tree import PAD_TOKEN, TokenTree, from_nodes, from_paths, root_only

_PER_DEPTH = 2e-5
"""Subtracted from a log-probability for each depth, so that rounding cannot lift a certain token above its parent."""


def best_trie(
    log_probs: Tensor,
    pending: Tensor,
    depth: int,
    size: int,
    candidates: int | None = None,
    beam: int | None = None,
) -> TokenTree:
    """Find the `size`-node trie of the most probable prefixes: exact, batched, without host synchronisation.

    Args:
        log_probs: `[B, T, V + 1]` normalised log-probabilities of the frames; the blank is the last symbol.
        candidates: Tokens that are searched in each row, those with the largest `Σ_j p_j(v)`; None for all. This sum
            bounds the probability of a prefix that contains `v`, so only prefixes below the best left-out token's are
            missed. Memory grows with `candidates · T²` per row.
        beam: Prefixes kept at each depth, one for a chain; None keeps as many as make the search exact.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    beam = min(size - 1, beam or size)
    if beam < 1 or depth < 1:
        return root_only(pending)
    batch, frames, symbols = log_probs.shape
    width = min(candidates or symbols, symbols - 1)
    probs = log_probs.float().exp()
    names = None
    emit, blank = probs[..., :-1], probs[..., -1:]
    if width < symbols - 1:
        names = emit.sum(1).topk(width, sorted=False).indices
        emit = emit.gather(2, names[:, None].expand(-1, frames, -1))

    # Transfers [B, C, T, 2T]: from the mass before each frame to (n + b | b) before each frame, one token later.
    runs = _runs(torch.cat([emit, blank], 2).transpose(1, 2))
    blanks = runs[:, -1]
    waits = torch.cat([blanks + torch.eye(frames, dtype=probs.dtype, device=probs.device), blanks], 2)
    transfer = torch.bmm(runs[:, :-1].flatten(1, 2), waits).view(batch * width, frames, 2 * frames)

    # A prefix has two rows of mass before each frame: n + b continues with a token other than its last, b may repeat
    # the last. The beam starts with the empty prefix, padded with prefixes of no mass, which sort last.
    mass = probs.new_zeros(batch, 2 * beam, frames)
    mass[:, 0] = waits[:, 0, :frames]
    last = torch.full((batch, beam), -1, device=probs.device)
    alphabet = torch.arange(width, device=probs.device)
    again = torch.arange(2, device=probs.device)[:, None].bool()
    row_of = torch.arange(batch, device=probs.device)[:, None] * (2 * beam)
    symbol_of = torch.arange(batch, device=probs.device)[:, None] * width
    rows, tokens, levels = [], [], []
    for level in range(depth):
        scores = torch.bmm(mass, emit).view(batch, beam, 2, width)
        scores.masked_fill_((last[:, :, None, None] == alphabet) != again, -1.0)
        prefix_probs, index = scores.view(batch, -1).topk(beam, sorted=False)
        row, last = index // width, index % width
        rows.append(row)
        tokens.append(last)
        levels.append(prefix_probs)
        if level + 1 < depth:
            before = mass.view(-1, 1, frames).index_select(0, (row + row_of).view(-1))
            mass = torch.bmm(before, transfer.index_select(0, (last + symbol_of).view(-1))).view(batch, -1, frames)

    place = torch.arange(depth * beam, device=probs.device)
    depths = place // beam + 1
    parents = torch.cat(rows, 1) // 2 + (depths - 2) * beam
    found = torch.cat(tokens, 1)
    return from_nodes(
        pending,
        found if names is None else names.gather(1, found),
        parents.clamp_min(-1),
        depths,
        torch.cat(levels, 1).log() - _PER_DEPTH * depths,
        size,
    )


def _runs(probs: Tensor) -> Tensor:
    """Return `[..., T, T]` with entries `[i, j] = Π_{i≤m<j} p_m`, 0 unless `i < j`, of probabilities `[..., T]`."""
    frames = probs.shape[-1]
    later = torch.ones(frames, frames, dtype=torch.bool, device=probs.device).triu(1)
    return torch.where(later, probs.roll(1, -1)[..., None, :], 1.0).cumprod(-1).triu(1)


def static_tree(
    log_probs: Tensor,
    pending: Tensor,
    depth: int,
    size: int,
    *,
    blank: bool = True,
    top_k: int = 4,
    alignments: int = 64,
) -> TokenTree:
    """Return the published fixed tree: collapsed alignments of the top k symbols of each frame.

    A prefix has the probability of the alignment up to the frame that completes it, the largest of several.

    Args:
        log_probs: `[B, T, V + 1]`, blank last; without a blank `[B, T, V]`.
        blank: Collapse alignments. Without a blank, frame `u` emits token `u`, as Medusa's heads do.
        top_k: Symbols that each frame offers.
        alignments: Paths of the fixed tree over the frames.
    """
    batch, frames, symbols = log_probs.shape
    best, names = log_probs.float().topk(min(top_k, symbols), dim=2)
    ranks = _rank_tensor(frames, best.shape[2], alignments, log_probs.device)
    index = ranks[None, :, :, None].expand(batch, -1, -1, -1)
    symbol = names[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0]
    prefix = best[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0].cumsum(2)
    if blank:
        return from_paths(pending, *collapse(symbol, prefix, symbols - 1, depth), size)
    return from_paths(pending, symbol[..., :depth], prefix[..., :depth], size)


def collapse(alignments: Tensor, log_probs: Tensor, blank: int, depth: int) -> tuple[Tensor, Tensor]:
    """Remove repeats, then blanks, from alignments `[..., T]`, and close the gaps.

    `log_probs` `[..., T]` are of each alignment up to each frame. Return paths `[..., depth]`, `PAD_TOKEN` past their
    ends, without later tokens; and the log-probability `[..., depth]` of the alignment up to the frame that completes
    each prefix, -inf past the end.
    """
    before = torch.cat([torch.full_like(alignments[..., :1], blank), alignments[..., :-1]], -1)
    emitted = (alignments != blank) & (alignments != before)
    # Removed symbols and too deep tokens go to a last column that is cut off.
    place = torch.where(emitted, emitted.cumsum(-1) - 1, depth).clamp_max(depth)
    shape = (*alignments.shape[:-1], depth + 1)
    paths = alignments.new_full(shape, PAD_TOKEN).scatter(-1, place, alignments)
    prefix_probs = log_probs.new_full(shape, -torch.inf).scatter(-1, place, log_probs)
    return paths[..., :depth], prefix_probs[..., :depth]


def rank_paths(frames: int, top_k: int, count: int) -> list[list[int]]:
    """Return the fixed tree: up to `count` rank vectors `[T]`, by ascending sum of ranks, early deviations first."""
    paths: list[list[int]] = []
    for total in range(frames * (top_k - 1) + 1):
        for frames_raised in itertools.combinations_with_replacement(range(frames), total):
            ranks = [frames_raised.count(frame) for frame in range(frames)]
            if max(ranks) < top_k:
                paths.append(ranks)
                if len(paths) == count:
                    return paths
    return paths


@functools.cache
def _rank_tensor(frames: int, top_k: int, count: int, device: torch.device) -> Tensor:
    """Return the rank vectors `[count, T]`, cached on the device because sending them synchronises."""
    with torch.inference_mode(False):
        return torch.tensor(rank_paths(frames, top_k, count), device=device)

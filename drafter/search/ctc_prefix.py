"""The exact best trie under CTC frames.

For a prefix `y_1..y_u` and frames `1..T` (Graves et al. 2006, prefix search):

    f_u(j) = p_j(y_u) · (b_{u-1}(j-1) + [y_u ≠ y_{u-1}] · n_{u-1}(j-1))     first arrival at y_u
    n_u(j) = f_u(j) + p_j(y_u) · n_u(j-1)                                    frame j says y_u
    b_u(j) = p_j(ε) · (b_u(j-1) + n_u(j-1))                                  frame j says blank
    π(y_1..y_u) = Σ_j f_u(j)                                                 prefix probability

`π` never grows when a prefix is extended. So the `N - 1` most probable prefixes form a trie, no other trie of
`N` nodes has a larger sum of `π` (the expected accepted length in the drafter's own belief), and a
level-synchronous beam finds it exactly: a node at depth `u` needs its `u - 1` ancestors in the trie, so at most
`N - u` nodes of that depth can be in it.

The recursion over frames is linear. With `s = b_{u-1}` or `b_{u-1} + n_{u-1}`, whichever the rule picks,
`n_u = s · L(y_u)` and `b_u = n_u · M`, where `L(y)[i, j] = Π_{i<m≤j} p_m(y)` and `M[i, j] = Π_{i<m≤j} p_m(ε)`.
So one depth is two small matrix products and one `topk`, for all rows, nodes and frames at once.

Probabilities, not their logarithms, are multiplied: over a handful of frames nothing that matters underflows. A
prefix less probable than float32 can hold (1e-38) is taken as impossible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes

_PER_DEPTH = 2e-5
"""Taken off a log price for each depth: rounding must not lift a sure token above the token before it."""


def best_trie(log_probs: Tensor, pending: Tensor, depth: int, size: int, candidates: int | None = None) -> TokenTree:
    """The `size`-node trie of the most probable prefixes: exact, batched, without host synchronisation.

    Args:
        log_probs: `[B, T, V + 1]` normalised log-probabilities of the frames; the blank is the last symbol.
        pending: `[B]` tokens of the roots.
        depth: Longest prefix.
        size: Nodes of each tree, root included.
        candidates: Search only the tokens with the largest `Σ_j p_j(v)`, this many a row; None searches all.
            A prefix that contains `v` is at most `Σ_j p_j(v)` probable, so the result is exact wherever its last
            node is at least as probable as that sum of the best token left out, and otherwise misses only
            prefixes below that sum. Memory grows with `candidates · T²` a row.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    beam = size - 1
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
    silent = runs[:, -1]
    waits = torch.cat([silent + torch.eye(frames, device=probs.device), silent], 2)
    transfer = torch.bmm(runs[:, :-1].flatten(1, 2), waits).view(batch * width, frames, 2 * frames)

    # A prefix is two rows of mass before each frame: n + b, to go on with another token than its last, and b, to say
    # its last token again. The beam starts with the empty prefix and with prefixes of no mass, which come last.
    mass = probs.new_zeros(batch, 2 * beam, frames)
    mass[:, 0] = waits[:, 0, :frames]
    last = torch.full((batch, beam), -1, device=probs.device)
    alphabet = torch.arange(width, device=probs.device)
    again = torch.arange(2, device=probs.device)[:, None].bool()
    row_of = torch.arange(batch, device=probs.device)[:, None] * (2 * beam)
    symbol_of = torch.arange(batch, device=probs.device)[:, None] * width
    rows, tokens, prices = [], [], []
    for level in range(depth):
        scores = torch.bmm(mass, emit).view(batch, beam, 2, width)
        scores.masked_fill_((last[:, :, None, None] == alphabet) != again, -1.0)
        price, index = scores.view(batch, -1).topk(beam, sorted=False)
        row, last = index // width, index % width
        rows.append(row)
        tokens.append(last)
        prices.append(price)
        if level + 1 < depth:
            before = mass.view(-1, 1, frames).index_select(0, (row + row_of).view(-1))
            mass = torch.bmm(before, transfer.index_select(0, (last + symbol_of).view(-1))).view(batch, -1, frames)

    place = torch.arange(depth * beam, device=probs.device)
    depths = place // beam + 1
    parents = torch.cat(rows, 1) // 2 + (depths - 2) * beam
    spelt = torch.cat(tokens, 1)
    return from_nodes(
        pending,
        spelt if names is None else names.gather(1, spelt),
        parents.clamp_min(-1),
        depths,
        torch.cat(prices, 1).log() - _PER_DEPTH * depths,
        size,
    )


def _runs(probs: Tensor) -> Tensor:
    """`[..., T]` probabilities of a symbol → `[..., T, T]`: entry `[i, j]` is `Π_{i≤m<j} p_m`, 0 unless `i < j`."""
    frames = probs.shape[-1]
    later = torch.ones(frames, frames, dtype=torch.bool, device=probs.device).triu(1)
    return torch.where(later, probs.roll(1, -1)[..., None, :], 1.0).cumprod(-1).triu(1)

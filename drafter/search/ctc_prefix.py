"""The exact best trie under CTC frames.

For a prefix `y_1..y_u` and frames `1..T` (Graves et al. 2006, prefix search):

    f_u(j) = p_j(y_u) · (b_{u-1}(j-1) + [y_u ≠ y_{u-1}] · n_{u-1}(j-1))     first arrival at y_u
    n_u(j) = f_u(j) + p_j(y_u) · n_u(j-1)                                    frame j emits y_u
    b_u(j) = p_j(ε) · (b_u(j-1) + n_u(j-1))                                  frame j emits a blank
    π(y_1..y_u) = Σ_j f_u(j)                                                 prefix probability

`π` never grows when a prefix is extended. So the `N - 1` most probable prefixes form a trie, and no other trie of `N`
nodes has a larger sum of `π`, the expected accepted length under the frames' distributions. A level-synchronous beam
finds this trie exactly: a node at depth `u` has `u - 1` ancestors below the root, so the trie has at most `N - u` nodes
of that depth.

The recursion over frames is linear. With `s = b_{u-1}` or `b_{u-1} + n_{u-1}`, whichever the rule picks,
`n_u = s · L(y_u)` and `b_u = n_u · M`, where `L(y)[i, j] = Π_{i<m≤j} p_m(y)` and `M[i, j] = Π_{i<m≤j} p_m(ε)`.
So one depth is two small matrix products and one `topk`, for all rows, nodes and frames at once.

The search multiplies probabilities instead of adding logarithms: over a handful of frames nothing that matters
underflows. A prefix less probable than float32 can hold (1e-38) counts as impossible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes

_PER_DEPTH = 2e-5
"""Subtracted from a log-probability for each depth, so that rounding cannot lift a sure token above its parent."""


def best_trie(log_probs: Tensor, pending: Tensor, depth: int, size: int, candidates: int | None = None) -> TokenTree:
    """Find the `size`-node trie of the most probable prefixes: exact, batched, without host synchronisation.

    Args:
        log_probs: `[B, T, V + 1]` normalised log-probabilities of the frames; the blank is the last symbol.
        pending: `[B]` tokens of the roots.
        depth: Longest prefix.
        size: Nodes of each tree, root included.
        candidates: Number of tokens that are searched in each row, those with the largest `Σ_j p_j(v)`; None for all.
            A prefix that contains `v` has a probability of at most `Σ_j p_j(v)`. So the search can miss only prefixes
            less probable than this sum for the best token left out. Memory grows with `candidates · T²` per row.

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
    blanks = runs[:, -1]
    waits = torch.cat([blanks + torch.eye(frames, dtype=probs.dtype, device=probs.device), blanks], 2)
    transfer = torch.bmm(runs[:, :-1].flatten(1, 2), waits).view(batch * width, frames, 2 * frames)

    # A prefix has two rows of mass before each frame: n + b goes on with a token other than its last, and b may repeat
    # its last token. The beam starts with the empty prefix and fills up with prefixes of no mass, which come last.
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

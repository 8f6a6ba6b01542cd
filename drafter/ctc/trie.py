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

from drafter.token_tree import TokenTree, from_nodes, root_only


def best_trie(
    log_probs: Tensor, pending: Tensor, depth: int, size: int, candidates: int | None = None
) -> TokenTree:
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
    batch, frames, symbols = log_probs.shape
    vocabulary = symbols - 1
    probs = log_probs.float().exp()
    blank = probs[..., vocabulary]
    width = min(candidates or vocabulary, vocabulary)
    if width < vocabulary:
        names = probs[..., :vocabulary].sum(1).topk(width, sorted=False).indices
        emit = probs.gather(2, names[:, None].expand(-1, frames, -1))
    else:
        names, emit = None, probs[..., :vocabulary]

    # Transfers [B, C, T, 2T]: from mass before a frame to (n + b, b) before the frame after. Row i is a first
    # arrival at frame i + 1; column j is the mass left before frame j + 1.
    said = _runs(emit.transpose(1, 2))
    waits = _runs(blank)
    waits = torch.cat([waits + torch.eye(frames, device=waits.device), waits], 2)
    transfer = (said.flatten(1, 2) @ waits).view(batch * width, frames, 2 * frames)

    # A state is [n + b | b] before each frame; as 2K rows, row 2k extends prefix k by another token than its
    # last, row 2k + 1 by its last token again.
    start = torch.cat([torch.ones_like(blank[:, :1]), blank[:, :-1]], 1).cumprod(1)
    state = start[:, None].expand(-1, 2, -1)
    last = torch.full((batch, 1), -1, device=pending.device)
    price = torch.zeros((batch, 1), device=pending.device)
    alphabet = torch.arange(width, device=pending.device)
    again = torch.arange(2, device=pending.device).bool()[:, None]
    rows = torch.arange(batch, device=pending.device)[:, None]
    beam, levels, first = 1, [], -1
    for level in range(1, depth + 1):
        keep = min(size - level, beam * width)
        if keep < 1:
            break
        scores = (state @ emit).view(batch, beam, 2, width)
        repeats = last[:, :, None, None] == alphabet
        scores = scores.masked_fill(repeats != again, -1.0)
        best, index = scores.flatten(1).topk(keep, sorted=False)
        row, last = index // width, index % width
        parent = row // 2
        # Rounding must not lift a child above its parent.
        price = torch.minimum(best.log(), price.gather(1, parent))
        levels.append((last, parent + first, price, torch.full_like(last, level)))
        first = 0 if level == 1 else first + beam
        if level < depth:
            mass = state.flatten(0, 1).index_select(0, (row + rows * 2 * beam).flatten())
            moved = mass[:, None] @ transfer.index_select(0, (last + rows * width).flatten())
            state = moved.view(batch, 2 * keep, frames)
        beam = keep
    if not levels:
        return root_only(pending)
    tokens, parents, prices, depths = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    if names is not None:
        tokens = names.gather(1, tokens)
    return from_nodes(pending, tokens, parents, depths, prices, size)


def _runs(probs: Tensor) -> Tensor:
    """`[..., T]` probabilities of one symbol → `[..., T, T]`: entry `[i, j]` is `Π_{i≤m<j} p_m`, 0 unless `i < j`."""
    frames = probs.shape[-1]
    later = torch.ones(frames, frames, device=probs.device).triu(1)
    shifted = torch.cat([torch.ones_like(probs[..., :1]), probs[..., :-1]], -1)[..., None, :]
    return torch.where(later.bool(), shifted, 1.0).cumprod(-1) * later

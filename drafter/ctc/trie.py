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

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.token_tree import TokenTree, from_nodes, root_only

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


class LabelModel(Protocol):
    """Frames that know the path so far. Paths of all rows come in one list; a path's state is a row of `[M, ...]`."""

    def start(self) -> Tensor:
        """State `[B, ...]` of the roots."""

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What frames `first..stop-1` (from 0) say after each path.

        Args:
            rows: `[M]` row of the batch that each path belongs to.
            state: `[M, ...]`.

        Returns:
            Logits of the tokens, `[M, stop - first, V]`, and the blank's probability `[M, stop - first]`: the tokens
            share the rest.
        """

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """State `[M, ...]` of paths one of `tokens` `[M]` longer."""


LATTICE_BEAM = 10
"""Prefixes a depth that heads keep in a lattice search, where each costs a network's forward."""


def best_lattice_trie(
    model: LabelModel,
    pending: Tensor,
    frames: int,
    band: int,
    depth: int,
    size: int,
    beam: int | None = None,
    least: float = 0.0,
) -> TokenTree:
    """The best trie where frames know the last labels: each frame says one new token or nothing.

    With `α_u(j)` the probability that the first `j` frames said exactly `y_1..y_u`, and `y_0` the pending token:

        α_u(j) = α_u(j-1) · p_j(ε | y_u) + α_{u-1}(j-1) · p_j(y_u | y_{u-1})
        π(y_1..y_u) = Σ_j α_{u-1}(j-1) · p_j(y_u | y_{u-1})

    There is no repeat rule, so "00" is ordinary. Frame `j` holds label `u` only within the band `u ≤ j < u + band`;
    what leaves it is lost to longer prefixes, so `π` still falls. With a band of 1 nothing but the token matters, and
    this is the best trie of conditional distributions, one a depth.

    Args:
        model: Prices tokens after paths.
        pending: `[B]` tokens of the roots.
        frames: T.
        band: Frames that may hold a label.
        depth: Longest prefix.
        size: Nodes of each tree, root included.
        beam: Prefixes kept a depth; None keeps as many as the tree could hold, which makes the search exact.
        least: Less probable paths are not extended, and frames that a path less probably comes to are not asked; not on
            a GPU, where the work must not depend on the tensors.
    """
    batch, device = pending.shape[0], pending.device
    look = not devices.is_asynchronous(device)
    # The paths to extend, of all rows: row and place in it, candidate, price, and the mass that has arrived.
    rows, place = torch.arange(batch, device=device), torch.zeros_like(pending)
    node, price = torch.full_like(pending, -1), torch.zeros(batch, device=device)
    arrival = torch.eye(1, band, device=device).expand(batch, band)
    state = model.start()
    width, found = 1, 0  # most paths of a row, and candidates of each row so far
    levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam or size)
        if keep < 1:
            break
        spoken, emit = _said(model, (level, min(level + band, frames)), rows, state, arrival, least)
        best, parent, token = _best_of_rows((spoken[:, None] @ emit)[:, 0], rows, place, (batch, width), keep)
        price = torch.minimum(best.log(), price[parent])
        levels.append((token, node[parent], price, torch.full_like(token, level + 1)))
        width = best.shape[1]
        if look:
            rows, place = _promising([level[2] for level in levels], size, least).nonzero().unbind(1)
            if not len(rows):
                break
        else:
            every = torch.arange(batch * width, device=device)
            rows, place = every // width, every % width
        parent, token, price = parent[rows, place], token[rows, place], price[rows, place]
        node, found = found + place, found + width
        arrival = F.pad(spoken[parent] * emit[parent, :, token], (0, band - spoken.shape[1]))
        state = model.extend(state[parent], token)
    if not levels:
        return root_only(pending)
    tokens, parents, prices, depths = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    return from_nodes(pending, tokens, parents, depths, prices, size)


def _said(
    model: LabelModel, frames: tuple[int, int], rows: Tensor, state: Tensor, arrival: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    """What the frames of a band say after each path.

    Args:
        model: Prices tokens after paths.
        frames: First of the band's frames and the one after its last.
        rows: `[M]` row of each path.
        state: `[M, ...]` of each path.
        arrival: `[M, band]` mass that has arrived at each frame, without what waits from the one before.
        least: See `best_lattice_trie`.

    Returns:
        `[M, K]` the mass that says some token at each of the first `K ≤ band` frames, and the tokens' shares of it,
        `[M, K, V]`. What is not asked says nothing, and lets go of its mass.
    """
    first, stop = frames
    if devices.is_asynchronous(arrival.device):
        logits, silent = model.score(first, stop, rows, state)
        here = [arrival[:, 0]]
        for i in range(1, stop - first):
            here.append(arrival[:, i] + here[-1] * silent[:, i - 1])
        return torch.stack(here, 1) * (1.0 - silent), logits.float().softmax(-1)
    logits, silent = model.score(first, first + 1, rows, state)
    spoken, emit = [arrival[:, :1] * (1.0 - silent)], [logits.float().softmax(-1)]
    waiting = arrival[:, 0] * silent[:, 0]
    for frame in range(first + 1, stop):
        arrived = arrival[:, frame - first] + waiting
        asked = (arrived > least).nonzero()[:, 0]
        if not len(asked) and frame + 1 == stop:
            break
        logits, silent = model.score(frame, frame + 1, rows[asked], state[asked])
        mass = arrived[asked, None]
        spoken.append(torch.zeros_like(spoken[0]).index_copy_(0, asked, mass * (1.0 - silent)))
        emit.append(torch.zeros_like(emit[0]).index_copy_(0, asked, logits.float().softmax(-1)))
        waiting = torch.zeros_like(arrived).index_copy_(0, asked, (mass * silent)[:, 0])
    if len(spoken) == 1:  # as nearly always where blanks are rare
        return spoken[0], emit[0]
    return torch.cat(spoken, 1), torch.cat(emit, 1)


def _best_of_rows(
    scores: Tensor, rows: Tensor, place: Tensor, shape: tuple[int, int], keep: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of each row: first of each path, then of the row, which is far less to sort than all.

    Args:
        scores: `[M, V]` of every token after every path.
        rows: `[M]` row of each path.
        place: `[M]` its place in the row.
        shape: Rows, and places in a row.
        keep: Continuations of a row, if there are as many.

    Returns:
        Scores, paths (places in `scores`) and tokens, `[B, keep]` each, falling; score 0 where a row has no more.
    """
    best, tokens = scores.topk(min(keep, scores.shape[1]))
    options = best.shape[1]
    by_row = best.new_zeros(*shape, options)
    by_row[rows, place] = best
    path_at = torch.zeros(shape, dtype=torch.long, device=scores.device)
    path_at[rows, place] = torch.arange(len(rows), device=scores.device)
    best, index = by_row.flatten(1).topk(min(keep, shape[1] * options))
    path = path_at.gather(1, index // options)
    return best, path, tokens[path, index % options]


def _promising(prices: list[Tensor], size: int, least: float) -> Tensor:
    """Which of the last level's prefixes their row may still need: those below a full tree have no child in it.

    Args:
        prices: `[B, K]` logarithms, of each level, falling in the last.
        size: Nodes of a tree, root included.
        least: Less probable ones are given up.

    Returns:
        `[B, K]` bool of the last level: true up to a place in each row, false from there.
    """
    found, floor = torch.cat(prices, 1), math.log(least) if least else -math.inf
    wanted = prices[-1] > floor
    if found.shape[1] >= size - 1:
        wanted &= prices[-1] > found.topk(size - 1, sorted=False).values.amin(1, keepdim=True)
    return wanted

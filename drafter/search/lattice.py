"""The best trie under frames that know the path so far: each says one new token, or nothing.

With `α_u(j)` the probability that the first `j` frames said exactly `y_1..y_u`, and `y_0` the pending token
(the stateless transducer: Graves 2012, arXiv 1211.3711; Ghodsi et al. 2020):

    α_u(j) = α_u(j-1) · p_j(ε | y_u) + α_{u-1}(j-1) · p_j(y_u | y_{u-1})
    π(y_1..y_u) = Σ_j α_{u-1}(j-1) · p_j(y_u | y_{u-1})

There is no repeat rule, so "00" is ordinary. Frame `j` holds label `u` only within the band `u ≤ j < u + band`; what
leaves it is lost to longer prefixes, so `π` still falls. With a band of 1 nothing but the token matters, and this is
the best trie of conditional distributions, one a depth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.search.contract import LabelModel
from drafter.search.lattice_on_host import best_trie_on_host
from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes

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
    """The `size`-node trie of the most probable prefixes, where frames know the last labels.

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

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    if not devices.is_asynchronous(pending.device):
        return best_trie_on_host(model, pending, frames, band, depth, size, beam or size, least)
    batch, device = pending.shape[0], pending.device
    # The paths to extend, `[B, W]`: place among all candidates and price; and `[B · W, band]` what has arrived.
    node, price = torch.full_like(pending, -1)[:, None], torch.zeros(batch, 1, device=device)
    arrival = torch.eye(1, band, device=device).expand(batch, band)
    state, found = model.start(), 0
    levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam or size)
        if keep < 1:
            break
        width = node.shape[1]
        row = torch.arange(batch * width, device=device) // width
        logits, silent = model.score(level, min(level + band, frames), row, state)
        spoken, shares = _spoken(arrival, silent), logits.float().softmax(-1)
        best, path, token = _best_of_rows((spoken[:, None] @ shares)[:, 0].unflatten(0, (batch, width)), keep)
        price = torch.minimum(best.log(), price.gather(1, path))
        levels.append((token, node.gather(1, path), price, torch.full_like(token, level + 1)))
        node = torch.arange(found, found + best.shape[1], device=device).expand(batch, -1)
        found += best.shape[1]
        path, token = (path + width * torch.arange(batch, device=device)[:, None]).flatten(), token.flatten()
        arrival = F.pad(spoken[path] * shares[path, :, token], (0, band - spoken.shape[1]))
        state = model.extend(state[path], token)
    if not levels:
        return root_only(pending)
    tokens, parents, prices, depths = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    return from_nodes(pending, tokens, parents, depths, prices, size)


def _spoken(arrival: Tensor, silent: Tensor) -> Tensor:
    """The mass `[M, K]` that says some token at each of the first K frames of a band.

    Args:
        arrival: `[M, band]` mass that has arrived at each frame, without what waits from the one before.
        silent: `[M, K]` the blank's probability there.
    """
    here = [arrival[:, 0]]
    for i in range(1, silent.shape[1]):
        here.append(arrival[:, i] + here[-1] * silent[:, i - 1])
    return torch.stack(here, 1) * (1.0 - silent)


def _best_of_rows(scores: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of each row: first of each path, then of the row, which is far less to sort than all.

    Args:
        scores: `[B, W, V]` of every token after every path.
        keep: Continuations of a row, if there are as many.

    Returns:
        Scores, paths and tokens, `[B, keep]` each, falling.
    """
    best, tokens = scores.topk(min(keep, scores.shape[2]))
    options = best.shape[2]
    best, index = best.flatten(1).topk(min(keep, best[0].numel()))
    return best, index // options, tokens.flatten(1).gather(1, index)

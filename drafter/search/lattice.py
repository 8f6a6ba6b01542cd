"""The best trie under frames that know the path so far: each frame emits one new token, or a blank.

Let `α_u(j)` be the probability that the first `j` frames emit exactly `y_1..y_u`, and `y_0` the pending token (the
stateless transducer: Graves 2012, arXiv 1211.3711; Ghodsi et al. 2020):

    α_u(j) = α_u(j-1) · p_j(ε | y_u) + α_{u-1}(j-1) · p_j(y_u | y_{u-1})
    π(y_1..y_u) = Σ_j α_{u-1}(j-1) · p_j(y_u | y_{u-1})

There is no repeat rule, so "00" is an ordinary path. Frame `j` may hold label `u` only within the band
`u ≤ j < u + band`. Mass that leaves the band is lost to longer prefixes, so `π` still falls along a path. With a band
of 1 only the tokens matter, and the search finds the best trie of conditional distributions, one for each depth.

The search goes level by level with a beam. It is written once, over two backends (see `lattice_backend`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter import devices
from drafter.search.contract import LabelModel
from drafter.search.lattice_backend import Array, Backend, Paths
from drafter.search.lattice_on_device import OnDevice
from drafter.search.lattice_on_host import OnHost
from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes

LATTICE_BEAM = 10
"""Prefixes of each depth that heads keep in a lattice search, because each costs a forward of their network."""


@torch.no_grad()
def best_lattice_trie(
    model: LabelModel,
    pending: Tensor,
    frames: int,
    band: int,
    depth: int,
    size: int,
    beam: int | None = None,
    least: float = 0.0,
    backend: Backend | None = None,
) -> TokenTree:
    """Find the `size`-node trie of the most probable prefixes.

    Args:
        model: Gives each token's probability after a path.
        pending: `[B]` tokens of the roots.
        frames: T, number of frames.
        band: Number of frames that may hold a label.
        depth: Longest prefix.
        size: Nodes of each tree, root included.
        beam: Prefixes kept at each depth. None keeps as many as the tree could hold, which makes the search exact.
        least: On a CPU, paths of no higher probability are not extended, and frames are not asked about paths that
            reach them with no more mass. A GPU ignores it, because its work must not depend on the tensors.
        backend: None takes `OnDevice` on an asynchronous device and `OnHost` on a CPU.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    if backend is None:
        backend = OnDevice(pending.device) if devices.is_asynchronous(pending.device) else OnHost(least)
    paths, batch = _roots(model, pending, backend), len(pending)
    levels: list[_Level] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam or size)
        if keep < 1:
            break
        emissions = _emissions(model, range(level, min(level + band, frames)), paths, backend)
        levels.append(_best_of_rows(emissions, paths, batch, keep, backend))
        chosen = backend.promising([one.probs for one in levels], size)
        if chosen is None:
            break
        paths = _extended(model, paths, emissions, levels[-1], chosen, backend)
    return _tree(pending, levels, size, backend)


@dataclass(frozen=True)
class _Emissions:
    """What the first K frames of a band emit after each of M paths.

    Args:
        masses: K times `[M]`: probability that the path is complete before the frame and that the frame emits a token.
        shares: K times `[M, V]`: each token's share of that mass.
    """

    masses: Sequence[Array]
    shares: Sequence[Tensor]


@dataclass(frozen=True)
class _Level:
    """The candidates of one depth.

    Args:
        tokens: `[B, K]` last token of each candidate.
        parents: `[B, K]` index of its parent among all candidates of the row; -1 for the root.
        probs: `[B, K]` its prefix probability; 0 where a row has fewer candidates.
        paths: `[B, K]` the path that it extends.
    """

    tokens: Array
    parents: Array
    probs: Array
    paths: Array


def _roots(model: LabelModel, pending: Tensor, backend: Backend) -> Paths:
    """Return the empty path of each row. All its mass arrives before the first frame."""
    whole = backend.array(torch.ones_like(pending, dtype=torch.float32))
    places = backend.array(torch.zeros_like(pending))
    return Paths(backend.arange(len(pending)), places, whole, [whole], model.start(), width=1, before=-1)


def _emissions(model: LabelModel, band: range, paths: Paths, backend: Backend) -> _Emissions:
    """Run the recursion over the frames of a band: a blank leaves mass for the next frame, a token takes it away."""
    ask = backend.ask(model, band, paths)
    masses: list[Array] = []
    shares: list[Tensor] = []
    reached = paths.arrival[0]
    for place, frame in enumerate(band, start=1):
        answer = ask(frame, reached)
        if answer is None:
            break
        share, blank = answer
        masses.append(reached * (1.0 - blank))
        shares.append(share)
        reached = reached * blank
        if place < len(paths.arrival):
            reached = reached + paths.arrival[place]
    return _Emissions(masses, shares)


def _best_of_rows(emissions: _Emissions, paths: Paths, batch: int, keep: int, backend: Backend) -> _Level:
    """Find the best continuations of each row: the best of each path first, since sorting those takes far less time."""
    scores, names = _best_of_paths(emissions, keep, backend)
    by_row, table = backend.by_row(scores, paths, batch)
    options = scores.shape[1]
    best, index = by_row.flatten(1).topk(min(keep, by_row[0].numel()))
    probs, index = backend.array(best), backend.array(index)
    path = table[backend.arange(batch)[:, None], index // options]
    tokens = backend.array(names)[path, index % options]
    # No child may come before its parent, which rounding could bring about after a sure token.
    return _Level(tokens, paths.nodes[path], backend.minimum(probs, paths.probs[path]), path)


def _best_of_paths(emissions: _Emissions, keep: int, backend: Backend) -> tuple[Tensor, Tensor]:
    """Return prefix probabilities and tokens `[M, k]` of the likeliest continuations of each path."""
    shares = emissions.shares
    masses = [backend.tensor(mass)[:, None] for mass in emissions.masses]
    keep = min(keep, shares[0].shape[1])
    if len(shares) == 1:
        # One frame's order needs no masses. On a CPU this is the usual case, because blanks are rare.
        best, tokens = shares[0].topk(keep)
        return best * masses[0], tokens
    scores = shares[0] * masses[0]
    for mass, share in zip(masses[1:], shares[1:], strict=True):
        scores.addcmul_(mass, share)
    best, tokens = scores.topk(keep)
    return best, tokens


def _extended(
    model: LabelModel, paths: Paths, emissions: _Emissions, level: _Level, chosen: Array | slice, backend: Backend
) -> Paths:
    """Return the paths to the `chosen` candidates of a level."""
    batch, width = level.paths.shape
    path, token = level.paths.reshape(-1)[chosen], level.tokens.reshape(-1)[chosen]
    state = paths.state.index_select(0, backend.tensor(path))
    return Paths(
        rows=paths.rows[path],
        places=backend.arange(batch * width)[chosen] % width,
        probs=level.probs.reshape(-1)[chosen],
        arrival=[
            mass[path] * backend.array(share)[path, token]
            for mass, share in zip(emissions.masses, emissions.shares, strict=True)
        ],
        state=model.extend(state, backend.tensor(token)),
        width=width,
        before=paths.before + paths.width,
    )


def _tree(pending: Tensor, levels: Sequence[_Level], size: int, backend: Backend) -> TokenTree:
    """Return the best tree of all candidates."""
    if not levels:
        return root_only(pending)
    tokens, parents, probs = (
        torch.cat([backend.tensor(part) for part in parts], 1)
        for parts in zip(*((one.tokens, one.parents, one.probs) for one in levels), strict=True)
    )
    widths = [one.tokens.shape[1] for one in levels]
    depths = [torch.full((width,), depth, device=pending.device) for depth, width in enumerate(widths, start=1)]
    return from_nodes(pending, tokens, parents, torch.cat(depths), probs.log(), size)

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
    search = _Search(model, backend, len(pending))
    paths = search.roots(pending)
    levels: list[_Level] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam or size)
        if keep < 1:
            break
        emissions = search.emissions(range(level, min(level + band, frames)), paths)
        levels.append(search.best_of_rows(emissions, paths, keep))
        chosen = backend.promising([one.probs for one in levels], size)
        if chosen is None:
            break
        paths = search.extended(paths, emissions, levels[-1], chosen)
    return search.tree(pending, levels, size)


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


class _Search:
    """The steps of the search at one level.

    Args:
        model: Gives each token's probability after a path.
        backend: Computes.
        batch: B.
    """

    def __init__(self, model: LabelModel, backend: Backend, batch: int) -> None:
        self._model, self._backend, self._batch = model, backend, batch
        self._each = backend.arange(batch)[:, None]

    def roots(self, pending: Tensor) -> Paths:
        """Return the empty path of each row. All its mass arrives before the first frame."""
        whole = self._backend.array(torch.ones_like(pending, dtype=torch.float32))
        places = self._backend.array(torch.zeros_like(pending))
        return Paths(self._each[:, 0], places, whole, [whole], self._model.start(), width=1, before=-1)

    def emissions(self, band: range, paths: Paths) -> _Emissions:
        """Run the recursion over a band: a blank leaves mass to the next frame, a token takes it away."""
        ask = self._backend.ask(self._model, band, paths)
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

    def best_of_rows(self, emissions: _Emissions, paths: Paths, keep: int) -> _Level:
        """Find the best continuations of each row: first the best of each path, because that is far less to sort."""
        scores, names = self._best_of_paths(emissions, keep)
        by_row, path_at = self._backend.by_row(scores, paths, self._batch)
        _, width, options = by_row.shape
        probs, index = map(self._backend.array, by_row.flatten(1).topk(min(keep, width * options)))
        path = path_at[self._each * width + index // options]
        # Rounding must not lift a sure token above the token before it.
        probs = self._backend.minimum(probs, paths.probs[path])
        return _Level(names[path, index % options], paths.nodes[path], probs, path)

    def _best_of_paths(self, emissions: _Emissions, keep: int) -> tuple[Array, Array]:
        """Return prefix probabilities and tokens `[M, k]` of the likeliest continuations of each path."""
        array, tensor = self._backend.array, self._backend.tensor
        masses, shares = emissions.masses, emissions.shares
        keep = min(keep, shares[0].shape[1])
        if len(shares) == 1:
            # The order of one frame's tokens does not depend on its mass. On a CPU this is the usual case, because
            # blanks are rare.
            best, tokens = map(array, shares[0].topk(keep))
            return best * masses[0][:, None], tokens
        scores = shares[0] * tensor(masses[0])[:, None]
        for mass, share in zip(masses[1:], shares[1:], strict=True):
            scores.addcmul_(tensor(mass)[:, None], share)
        best, tokens = map(array, scores.topk(keep))
        return best, tokens

    def extended(self, paths: Paths, emissions: _Emissions, level: _Level, chosen: Array | slice) -> Paths:
        """Return the paths to the `chosen` candidates of a level."""
        array, tensor = self._backend.array, self._backend.tensor
        width = level.paths.shape[1]
        path, token = level.paths.reshape(-1)[chosen], level.tokens.reshape(-1)[chosen]
        state = paths.state.index_select(0, tensor(path))
        return Paths(
            rows=paths.rows[path],
            places=self._backend.arange(self._batch * width)[chosen] % width,
            probs=level.probs.reshape(-1)[chosen],
            arrival=[
                mass[path] * array(share)[path, token]
                for mass, share in zip(emissions.masses, emissions.shares, strict=True)
            ],
            state=self._model.extend(state, tensor(token)),
            width=width,
            before=paths.before + paths.width,
        )

    def tree(self, pending: Tensor, levels: Sequence[_Level], size: int) -> TokenTree:
        """Return the best tree of all candidates."""
        if not levels:
            return root_only(pending)
        tokens, parents, probs = (
            torch.cat([self._backend.tensor(part) for part in parts], 1)
            for parts in zip(*((one.tokens, one.parents, one.probs) for one in levels), strict=True)
        )
        widths = [one.tokens.shape[1] for one in levels]
        depths = [torch.full((width,), depth, device=pending.device) for depth, width in enumerate(widths, start=1)]
        return from_nodes(pending, tokens, parents, torch.cat(depths), probs.log(), size)

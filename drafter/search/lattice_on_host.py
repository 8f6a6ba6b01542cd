"""`best_lattice_trie` where a look at a result costs nothing: on a CPU, only what may matter to the tree is computed.

The head's network runs in PyTorch. All around it are few and small numbers, and dozens of operations on them a level:
numpy's take a fraction of the time to be called.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.search.contract import LabelModel
from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes

_Masses = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Paths:
    """The paths to extend, of all rows, a row's one after another.

    Args:
        rows: `[M]` row of each.
        nodes: `[M]` its place among all candidates of the row so far; -1 for the root.
        prices: `[M]` its prefix probability.
        arrival: `[M, band]` mass that has arrived at each frame, without what waits from the one before.
        state: `[M, ...]` of the model.
    """

    rows: _Ids
    nodes: _Ids
    prices: _Masses
    arrival: _Masses
    state: Tensor


@dataclass(frozen=True)
class _Said:
    """What the first `K` frames of a band say after each path; what is not asked says nothing, and loses its mass.

    Args:
        masses: K times `[M]`: the mass that says some token at the frame.
        shares: K times `[M, V]`: the tokens' shares of it.
    """

    masses: list[_Masses]
    shares: list[Tensor]

    def best(self, keep: int) -> tuple[_Masses, _Ids]:
        """Mass `[M, k]` and ids `[M, k]` of the likeliest tokens after each path, falling."""
        if len(self.masses) == 1:  # as nearly always where blanks are rare
            shares, tokens = self.shares[0].topk(min(keep, self.shares[0].shape[1]))
            return shares.numpy() * self.masses[0][:, None], tokens.numpy()
        scores = torch.zeros_like(self.shares[0])
        for mass, shares in zip(self.masses, self.shares, strict=True):
            scores.addcmul_(torch.from_numpy(mass)[:, None], shares)
        best, tokens = scores.topk(min(keep, scores.shape[1]))
        return best.numpy(), tokens.numpy()

    def arrival(self, paths: _Ids, tokens: _Ids, band: int) -> _Masses:
        """Mass `[M', band]` that goes on from each of `paths` `[M']` by its token."""
        arrival = np.zeros((len(paths), band), dtype=np.float32)
        for frame, (mass, share) in enumerate(zip(self.masses, self.shares, strict=True)):
            arrival[:, frame] = mass[paths] * share.numpy()[paths, tokens]
        return arrival


@torch.no_grad()
def best_trie_on_host(
    model: LabelModel, pending: Tensor, frames: int, band: int, depth: int, size: int, beam: int, least: float
) -> TokenTree:
    """See `best_lattice_trie`."""
    batch = len(pending)
    paths = _Paths(
        rows=np.arange(batch),
        nodes=np.full(batch, -1),
        prices=np.ones(batch, dtype=np.float32),
        arrival=np.eye(1, band, dtype=np.float32).repeat(batch, 0),
        state=model.start(),
    )
    each, width, found = np.arange(batch), 1, 0
    tokens: list[_Ids] = []
    parents: list[_Ids] = []
    prices: list[_Masses] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam)
        if keep < 1:
            break
        said = _said(model, range(level, min(level + band, frames)), paths, least)
        scores, names = said.best(keep)
        options = scores.shape[1]
        first = paths.rows.searchsorted(each)  # path of each row
        by_row = np.zeros((batch, width, options), dtype=np.float32)
        by_row[paths.rows, np.arange(len(paths.rows)) - first[paths.rows]] = scores
        best, index = (part.numpy() for part in torch.from_numpy(by_row).flatten(1).topk(min(keep, width * options)))
        # Where a row has no more continuations this is any path; none comes of it, as its score is 0.
        path = np.minimum(first[:, None] + index // options, len(paths.rows) - 1)
        token = names[path, index % options]
        price = np.minimum(best, paths.prices[path])
        tokens.append(token)
        parents.append(paths.nodes[path])
        prices.append(price)
        rows, places = _promising(prices, size, least).nonzero()
        if not len(rows):
            break
        path, token = path[rows, places], token[rows, places]
        paths = _Paths(
            rows,
            found + places,
            price[rows, places],
            said.arrival(path, token, band),
            model.extend(paths.state.index_select(0, torch.from_numpy(path)), torch.from_numpy(token)),
        )
        width, found = price.shape[1], found + price.shape[1]
    if not tokens:
        return root_only(pending)
    depths = np.repeat(np.arange(1, len(tokens) + 1), [part.shape[1] for part in tokens])
    return from_nodes(
        pending,
        torch.from_numpy(np.concatenate(tokens, 1)),
        torch.from_numpy(np.concatenate(parents, 1)),
        torch.from_numpy(depths),
        torch.from_numpy(np.concatenate(prices, 1)).log(),
        size,
    )


def _said(model: LabelModel, band: range, paths: _Paths, least: float) -> _Said:
    """What the frames of a band say after each path.

    Args:
        model: Prices tokens after paths.
        band: The frames.
        paths: M paths.
        least: Frames that a path less probably comes to are not asked, but for the first.
    """
    rows = torch.from_numpy(paths.rows)
    said = _Said([], [])
    waiting: _Masses = np.zeros(len(paths.rows), dtype=np.float32)
    for place, frame in enumerate(band):
        arrived: _Masses = paths.arrival[:, place] + waiting
        asked = (arrived > least).nonzero()[0] if place else np.arange(len(arrived))
        if not len(asked) and frame == band[-1]:
            break
        some = len(asked) < len(arrived)
        which = torch.from_numpy(asked)
        logits, silent = model.score(
            frame, frame + 1, rows[which] if some else rows, paths.state[which] if some else paths.state
        )
        shares = logits[:, 0].float().softmax(-1)
        blank: _Masses = silent[:, 0].numpy()
        mass: _Masses = arrived[asked]
        speaks: _Masses = mass * (1.0 - blank)
        waits: _Masses = mass * blank
        if some:
            shares = shares.new_zeros(len(arrived), shares.shape[1]).index_copy_(0, which, shares)
            speaks, waits = _spread(speaks, asked, len(arrived)), _spread(waits, asked, len(arrived))
        said.masses.append(speaks)
        said.shares.append(shares)
        waiting = waits
    return said


def _spread(values: _Masses, places: _Ids, count: int) -> _Masses:
    """`[count]` with `values` at `places` and 0 elsewhere."""
    spread = np.zeros(count, dtype=np.float32)
    spread[places] = values
    return spread


def _promising(prices: list[_Masses], size: int, least: float) -> npt.NDArray[np.bool_]:
    """Which of the last level's prefixes their row may still need: those below a full tree have no child in it.

    Args:
        prices: `[B, K]` of each level.
        size: Nodes of a tree, root included.
        least: Less probable ones are given up.

    Returns:
        `[B, K]` of the last level.
    """
    wanted = prices[-1] > least
    found = np.concatenate(prices, 1)
    if (beyond := found.shape[1] - (size - 1)) >= 0:
        wanted &= prices[-1] > np.partition(found, beyond, axis=1)[:, beyond, None]
    return wanted

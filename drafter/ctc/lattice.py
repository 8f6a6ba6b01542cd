"""Lattice search: the best trie under frames that depend on the path so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter import devices
from drafter.tree.token_tree import TokenTree, from_nodes, promising, root_only


class LabelModel(Protocol):
    """Distributions of frames after paths. The paths of all rows come in one list, as rows of the state."""

    def start(self) -> Tensor:
        """Return the state `[B, ...]` of each row's empty path."""

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distributions of frames `first..stop-1` (from 0) after M paths, by their `rows` and `state`.

        They are shares of the V tokens that may be drafted, fp32 `[M, stop - first, V]`, given that one is emitted; and
        the blank's probability `[M, stop - first]`.
        """

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Append one of `tokens` `[M]`, indices into the shares of `score`, to each path; return `[M, ...]`."""


LATTICE_BEAM = 10
"""Prefixes that heads keep at each depth; each costs a forward of their joint network."""


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
) -> TokenTree:
    """Find the `size`-node trie of the most probable prefixes. Each frame emits one new token or a blank.

    Args:
        frames: T, number of frames.
        band: Number of frames that may hold a label.
        beam: Prefixes kept at each depth. None keeps as many as the tree could hold, which makes the search exact.
        least: On a CPU, prefixes of no higher probability are not extended.

    Returns:
        Trees `[B, size]`; rows with fewer possible prefixes are padded.
    """
    rows = torch.arange(len(pending), device=pending.device)
    whole = torch.ones(len(pending), dtype=torch.float32, device=pending.device)
    # The empty path of each row. All its mass arrives before the first frame.
    paths = _Paths(rows, None, 1, torch.full_like(rows, -1), whole, [whole], model.start(), before=0)
    levels: list[_Level] = []
    for level in range(min(depth, frames)):
        keep = min(size - 1 - level, beam or size)
        if keep < 1:
            break
        masses, shares = _emissions(model, level, min(level + band, frames), paths)
        levels.append(_best_of_rows(masses, shares, paths, len(pending), keep))
        chosen = None
        if not devices.is_asynchronous(pending.device):
            chosen = promising([one.probs for one in levels], size, least).flatten().nonzero()[:, 0]
            if not len(chosen):
                break
        paths = _extended(model, paths, masses, shares, levels[-1], chosen)
    if not levels:
        return root_only(pending)
    tokens, parents, probs = (
        torch.cat(parts, 1) for parts in zip(*((one.tokens, one.parents, one.probs) for one in levels), strict=True)
    )
    widths = [one.tokens.shape[1] for one in levels]
    depths = [torch.full((width,), at, device=pending.device) for at, width in enumerate(widths, start=1)]
    return from_nodes(pending, tokens, parents, torch.cat(depths), probs.log(), size)


@dataclass(frozen=True)
class _Paths:
    """M of the B · W paths of one level, ordered by row, which the next level extends."""

    rows: Tensor  # `[M]` row of each path
    places: Tensor | None  # `[M]` its index among the B · W; None if M is all of them
    width: int  # W
    nodes: Tensor  # `[M]` index of its last node among all candidates of its row; -1 for the root
    probs: Tensor  # `[M]` its prefix probability
    arrival: Sequence[Tensor]  # `[M]` for each frame of the band: mass that arrives there with the path's last token
    state: Tensor  # `[M, ...]` state of the label model
    before: int  # candidates of each row at this level and the levels above


@dataclass(frozen=True)
class _Level:
    """The K candidates of one depth, each `[B, K]`."""

    tokens: Tensor  # last token
    parents: Tensor  # index of the parent among all candidates of the row; -1 for the root
    probs: Tensor  # prefix probability; 0 where a row has fewer candidates
    paths: Tensor  # the path that it extends


def _emissions(model: LabelModel, first: int, stop: int, paths: _Paths) -> tuple[list[Tensor], Tensor]:
    """Run the recursion over a band: a blank leaves mass to the next frame, a token takes it away.

    Return for each of K frames `[M]`, the probability that the path is complete before the frame and that the frame
    emits a token; and each token's share of that mass, `[M, K, V]`.
    """
    # All frames are scored at once: few large kernels take less time than many small ones.
    shares, blanks = model.score(first, stop, paths.rows, paths.state)
    masses: list[Tensor] = []
    reached = paths.arrival[0]
    for place, blank in enumerate(blanks.unbind(1), start=1):
        masses.append(reached * (1.0 - blank))
        reached = reached * blank
        if place < len(paths.arrival):
            reached = reached + paths.arrival[place]
    return masses, shares


def _best_of_rows(masses: list[Tensor], shares: Tensor, paths: _Paths, batch: int, keep: int) -> _Level:
    """Find the best continuations of each row. Selecting the best of each path first leaves far less to sort."""
    # One product reads the shares once.
    scores = torch.bmm(torch.stack(masses, 1)[:, None], shares)[:, 0]
    best, names = scores.topk(min(keep, scores.shape[1]))
    options = best.shape[1]
    path_at = torch.arange(batch * paths.width, device=best.device)
    if paths.places is not None:
        best = best.new_zeros(batch * paths.width, options).index_copy_(0, paths.places, best)
        path_at = torch.zeros_like(path_at).index_copy_(0, paths.places, torch.arange(len(names), device=best.device))
    by_row = best.view(batch, -1)
    probs, index = by_row.topk(min(keep, by_row.shape[1]))
    row = torch.arange(batch, device=index.device)[:, None]
    path = path_at[row * paths.width + index // options]
    # Rounding must not lift a sure token above the token before it.
    probs = torch.minimum(probs, paths.probs[path])
    return _Level(names[path, index % options], paths.nodes[path], probs, path)


def _extended(
    model: LabelModel, paths: _Paths, masses: list[Tensor], shares: Tensor, level: _Level, chosen: Tensor | None
) -> _Paths:
    """Return the paths to the `chosen` candidates of a level; None for all."""
    batch, width = level.paths.shape
    nodes = (paths.before + torch.arange(width, device=level.paths.device)).repeat(batch)
    path, token, probs = level.paths.flatten(), level.tokens.flatten(), level.probs.flatten()
    if chosen is not None:
        path, token, probs, nodes = path[chosen], token[chosen], probs[chosen], nodes[chosen]
    return _Paths(
        rows=paths.rows[path],
        places=chosen,
        width=width,
        nodes=nodes,
        probs=probs,
        arrival=[mass[path] * shares[path, at, token] for at, mass in enumerate(masses)],
        state=model.extend(paths.state.index_select(0, path), token),
        before=paths.before + width,
    )

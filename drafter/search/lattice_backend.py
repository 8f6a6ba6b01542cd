"""What the lattice search leaves to a backend: which arrays it computes on, and which work it may leave out.

There are two backends. `OnDevice` does the same work whatever the tensors hold, so a GPU can record the search and the
host need not wait for it. `OnHost` looks at each result and computes only what may still matter to the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from drafter.search.contract import LabelModel

Array = Any
"""A tensor or a numpy array, whichever the backend computes on. Both have the same operators and the same indexing."""

Ask = Callable[[int, Array], tuple[Tensor, Array] | None]
"""Asks one frame of a band what it emits after each of `M` paths.

Takes the frame and the probability mass `[M]` that reaches it. Returns the tokens' shares `[M, V]`, which sum to 1, and
the blank's probability `[M]`; both are 0 for a path that the frame was not asked about. Returns None if the frame was
asked about no path and no later frame of the band matters.
"""


@dataclass(frozen=True)
class Paths:
    """The paths of one level that the next level extends.

    Args:
        rows: `[M]` row of each path.
        places: `[M]` place of the path's last node among the `width` candidates of its row at its level.
        probs: `[M]` prefix probability of the path.
        arrival: One `[M]` for each frame of the band: the mass that arrives at the frame with the path's last token.
            Frames past the end of the list have none.
        state: `[M, ...]` state of the label model.
        width: Candidates of each row at the level.
        before: Candidates of each row at the levels above; -1 for the level of the root.
    """

    rows: Array
    places: Array
    probs: Array
    arrival: Sequence[Array]
    state: Tensor
    width: int
    before: int

    @property
    def nodes(self) -> Array:
        """`[M]` index of each path's last node among all candidates of its row; -1 for the root."""
        return self.before + self.places


class Backend(Protocol):
    """A library of arrays, and the three places where the search may leave work out."""

    def array(self, tensor: Tensor) -> Array:
        """Return `tensor` as an array, without a copy."""

    def tensor(self, array: Array) -> Tensor:
        """Return `array` as a tensor, without a copy."""

    def arange(self, count: int) -> Array:
        """Return `0..count-1`."""

    def minimum(self, first: Array, second: Array) -> Array:
        """Return the smaller of two arrays, element by element."""

    def ask(self, model: LabelModel, band: range, paths: Paths) -> Ask:
        """Return what asks each frame of `band` in turn what it emits after `paths`."""

    def by_row(self, scores: Tensor, paths: Paths, batch: int) -> tuple[Tensor, Array]:
        """Lay out the scores of paths by row.

        Args:
            scores: `[M, K]` scores of each path's continuations.
            paths: The M paths.
            batch: B.

        Returns:
            Scores `[B, W, K]`, 0 where a row has fewer than W paths, and `[B, W]` the path at each place, any path
            where there is none.
        """

    def promising(self, probs: Sequence[Array], size: int) -> Array | slice | None:
        """Choose the nodes of the last level that the search extends.

        Args:
            probs: `[B, K]` prefix probabilities of each level so far.
            size: Nodes of a tree, root included.

        Returns:
            Index into the flattened last level `[B * K]`; None if no node need be extended.
        """

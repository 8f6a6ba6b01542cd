"""The contract between the lattice search and a head: frames that know the path so far."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LabelModel(Protocol):
    """Distributions of frames after paths. The paths of all rows come in one list; a path's state is a row of it."""

    def start(self) -> Tensor:
        """Return the state `[B, ...]` of the empty path of each row."""

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distributions of frames `first..stop-1` (from 0) after M paths.

        Args:
            first: The first frame.
            stop: The frame after the last.
            rows: `[M]` row of the batch that each path belongs to.
            state: `[M, ...]` state of each path.

        Returns:
            Shares of the V tokens that may be drafted, fp32 `[M, stop - first, V]`, which sum to 1, and the blank's
            probability `[M, stop - first]`. The tokens share the probability that is left.
        """

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the state `[M, ...]` of paths that are each one of `tokens` `[M]` longer.

        Tokens are known by the place of their share, as in the trees that the search makes.
        """

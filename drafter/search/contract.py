"""What a lattice search asks of a head: frames that know the path so far."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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

"""How often token n-grams occur in a corpus, counted in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.drafters.tables.frozen_table import FrozenTable

Grams = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


class NgramCounts:
    """Counts the n-grams of texts.

    At most `most` of them are kept, the most frequent ones, each time that as many occurrences have come (after Lossy
    Counting, Manku and Motwani 2002): what falls out and comes again is counted from then on, so a count is never too
    high. Where no more than `most` different ones occur, counts are exact.

    Args:
        most: N-grams that are kept; twice as many are held for a moment, at 24 bytes and as much again for sorting.
        length: Tokens of an n-gram, of which the first is the leader.
    """

    def __init__(self, most: int, length: int = 4) -> None:
        self._most, self._length = most, length
        self._grams: Grams = np.empty((0, length), np.int32)
        self._counts: Counts = np.empty(0, np.int64)
        self._new: list[Grams] = []
        self._waiting = 0
        self.tokens = 0
        """Tokens of all texts."""

    def __len__(self) -> int:
        """N-grams that are kept."""
        self._merge()
        return len(self._counts)

    def add(self, text: Sequence[int]) -> None:
        """Count the n-grams of a text."""
        self.tokens += len(text)
        tokens = np.asarray(text, np.int32)
        for start in range(0, len(tokens) - self._length + 1, self._most):  # a text may be longer than the memory
            piece = tokens[start : start + self._most + self._length - 1]
            self._new.append(np.lib.stride_tricks.sliding_window_view(piece, self._length))
            self._waiting += len(self._new[-1])
            if self._waiting >= self._most:
                self._merge()

    def table(self, leaders: int, followers: int) -> FrozenTable:
        """Return the most frequent n-grams as a table.

        Args:
            leaders: Leaders at most: those that occur most often.
            followers: Followers of a leader at most: those that occur most often after it.
        """
        self._merge()
        # N-grams are sorted, so those of a leader stand together.
        tokens, starts = np.unique(self._grams[:, 0], return_index=True)
        totals = np.add.reduceat(self._counts, starts) if len(starts) else self._counts
        kept = np.sort(np.argsort(-totals, kind="stable")[:leaders])
        leader = np.searchsorted(tokens, self._grams[:, 0])  # of each n-gram
        order = np.lexsort((-self._counts, leader))
        rank = np.arange(len(order)) - starts[leader[order]] if len(order) else order
        chosen = order[(rank < followers) & np.isin(leader[order], kept)]
        sizes = np.bincount(leader[chosen], minlength=len(tokens))[kept]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return FrozenTable(tokens[kept], offsets, self._grams[chosen, 1:])

    def _merge(self) -> None:
        """Add up what has come to what is kept, and keep the most frequent."""
        if not self._new:
            return
        grams = np.concatenate([self._grams, *self._new])
        counts = np.concatenate([self._counts, np.ones(self._waiting, np.int64)])
        self._new, self._waiting = [], 0
        order = np.lexsort(grams.T[::-1])
        grams, counts = grams[order], counts[order]
        starts = np.flatnonzero(np.concatenate([[True], (grams[1:] != grams[:-1]).any(1)]))
        grams, counts = grams[starts], np.add.reduceat(counts, starts)
        if len(counts) > self._most:
            kept = np.sort(np.argsort(-counts, kind="stable")[: self._most])
            grams, counts = grams[kept], counts[kept]
        self._grams, self._counts = grams, counts

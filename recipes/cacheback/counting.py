"""Counts of n-grams in a corpus, and the table of the most frequent ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.methods.cacheback.frozen_table import FrozenTable

Grams = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


class NgramCounts:
    """Counts n-grams of texts in bounded memory; the first of `length` tokens is the leader.

    Whenever `most` occurrences have come, only the `most` frequent n-grams are kept (after Lossy Counting, Manku and
    Motwani 2002), so counts are exact for up to `most` n-grams and never overestimate. Memory peaks at twice as many
    n-grams, at 24 bytes and as much again for sorting.
    """

    def __init__(self, most: int, length: int = 4) -> None:
        self._most, self._length = most, length
        self._grams: Grams = np.empty((0, length), np.int32)
        self._counts: Counts = np.empty(0, np.int64)
        self._new: list[Grams] = []
        self._waiting = 0
        self.tokens = 0

    def __len__(self) -> int:
        self._merge()
        return len(self._counts)

    def add(self, text: Sequence[int]) -> None:
        self.tokens += len(text)
        tokens = np.asarray(text, np.int32)
        for start in range(0, len(tokens) - self._length + 1, self._most):  # a text may exceed the memory
            piece = tokens[start : start + self._most + self._length - 1]
            self._new.append(np.lib.stride_tricks.sliding_window_view(piece, self._length))
            self._waiting += len(self._new[-1])
            if self._waiting >= self._most:
                self._merge()

    def table(self, leaders: int, followers: int) -> FrozenTable:
        """Return the `leaders` most frequent leaders, each with its `followers` most frequent followers."""
        self._merge()
        # N-grams are sorted, so those of a leader are contiguous.
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

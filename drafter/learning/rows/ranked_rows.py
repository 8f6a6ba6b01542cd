"""Rows kept by rank within a limit of memory: the most recent and the most surprising first."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")

_HALF_LIFE = 512.0
"""A row counts as much as one that came so many rows later and is half as surprising."""


def rank(surprise: float, arrival: int) -> float:
    """How much a row is worth learning from, as a logarithm to base 2: more if it is surprising, and if it is new.

    What came earlier is worth less as time goes on, but the order of two rows never changes. So a rank is a constant.

    Args:
        surprise: In (0, 1]; see `RowSample.surprise`.
        arrival: Rows that had come before.
    """
    return math.log2(max(surprise, 1e-6)) + arrival / _HALF_LIFE


class RankedRows(Generic[Row]):
    """Keeps what ranks highest.

    Args:
        nbytes: Memory of all rows together at most.

    Attributes:
        used: Bytes of the rows that are kept.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit, self.used = nbytes, 0
        self._rows: list[tuple[float, int, int, Row]] = []  # rank, place in time, bytes, row; by rising rank
        self._count = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (row for *_, row in self._rows)

    def takes(self, rank: float, nbytes: int) -> bool:
        """Whether a row would be kept: there is room, if those that rank lower go."""
        room = self._limit - self.used
        for lower, _, size, _ in self._rows:
            if room >= nbytes or lower >= rank:
                break
            room += size
        return room >= nbytes

    def put(self, rank: float, nbytes: int, row: Row) -> bool:
        """Keep a row, in the place of those that rank lower; False if there is no room for it among them."""
        if not self.takes(rank, nbytes):
            return False
        while self.used + nbytes > self._limit:
            self.used -= self._rows.pop(0)[2]
        self._count += 1  # rows themselves have no order
        insort(self._rows, (rank, self._count, nbytes, row))
        self.used += nbytes
        return True

    def take_best(self) -> tuple[float, Row] | None:
        """Take out the row of the highest rank, with that; None if there is none."""
        if not self._rows:
            return None
        rank, _, nbytes, row = self._rows.pop()
        self.used -= nbytes
        return rank, row

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self.used = [], 0

"""Where an engine leaves rows for a learner: a few, in bounded memory, until somebody takes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter.learning.contract import EndedRow, RowSample
from drafter.learning.rows.ranked_rows import RankedRows, rank

_NBYTES = 64 << 20
"""Memory of rows that nobody has taken yet."""


@dataclass(frozen=True)
class _Pending:
    """A row whose hidden states may still be on their way to the host."""

    row: EndedRow
    hidden: Tensor | None
    arrived: torch.cuda.Event | None

    def sample(self) -> RowSample:
        """The row, once all of it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = torch.from_numpy(np.array([*self.row.prompt, *self.row.output], dtype=np.int64))
        return RowSample(self.row.request_id, tokens, len(self.row.prompt), self.hidden, self.row.steps)


class SampleTap:
    """A `RowTap`: keeps the most recent and most surprising rows. `take` and the like may be called from any thread.

    Args:
        nbytes: Memory that rows may take here.
    """

    def __init__(self, nbytes: int = _NBYTES) -> None:
        self._rows: RankedRows[_Pending] = RankedRows(nbytes)
        self._lock = threading.Lock()
        self._seen, self._paused = 0, False

    # ---- on the engine's thread

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        """Whether there is room for it, or it is more worth than what is here; see `RowTap`."""
        with self._lock:
            self._seen += 1
            return not self._paused and self._rows.takes(self._rank(row), nbytes + self._text_bytes(row))

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        """Keep a row; see `RowTap`."""
        nbytes = self._text_bytes(row) + (0 if hidden is None else hidden.nbytes)
        with self._lock:
            self._rows.put(self._rank(row), nbytes, _Pending(row, hidden, arrived))

    # ---- on any thread

    def take(self, nbytes: int) -> list[RowSample]:
        """Take rows out, the best first, until they have `nbytes` bytes together, or all."""
        found: list[_Pending] = []
        with self._lock:
            until = self._rows.used - nbytes
            while self._rows.used > max(until, 0) and (best := self._rows.take_best()) is not None:
                found.append(best[1])
        return [one.sample() for one in found]

    def pause(self) -> None:
        """Take no rows for now, and forget those that are here: nothing is copied any more."""
        with self._lock:
            self._paused = True
            self._rows.clear()

    def resume(self) -> None:
        """Take rows again."""
        with self._lock:
            self._paused = False

    def _rank(self, row: EndedRow) -> float:
        return rank(row.steps / max(len(row.output), 1), self._seen)

    @staticmethod
    def _text_bytes(row: EndedRow) -> int:
        return 8 * row.length

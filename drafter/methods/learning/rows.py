"""Rows kept by rank within a limit of memory: the most recent and the most surprising first."""

from __future__ import annotations

import hashlib
import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.engine.tap import EndedRow
from drafter.methods.learning.contract import RowSample
from drafter.methods.learning.settings import LearnerSettings
from drafter.training.targets import RegeneratedText

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


# ---- The rows that a learner has: those it learns from, and a few prompts that it only measures on.

_USED = 0.5
"""What a use takes off a row's rank: as if the row were 256 rows older."""
_WALKED = 256
"""Tokens of an answer that are measured on: its first ones."""


@dataclass(frozen=True)
class _Row:
    """A row to learn from, and how often that has been done; or one to measure on, and the place of its prompt."""

    text: RegeneratedText
    nbytes: int
    uses: int = 0
    place: float = 0.0


class LearningRows:
    """Takes rows as they come, in bounded memory.

    Args:
        settings: How much is kept, how often a row is used, and what is held out.

    Attributes:
        seen: Rows that came and could be used.
        tokens: Their output tokens.
        first: The first place of their prompts; see `place_of`.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._rows: RankedRows[_Row] = RankedRows(settings.buffer_bytes)
        self._held_out: deque[_Row] = deque()
        self.seen = self.tokens = 0
        self.first = 1.0

    def __len__(self) -> int:
        """Rows to learn from."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._rows.used + sum(row.nbytes for row in self._held_out)

    @property
    def held_out(self) -> list[RegeneratedText]:
        """Rows to measure on."""
        return [row.text for row in self._held_out]

    def add(self, sample: RowSample) -> None:
        """Take a row. One without output, or whose hidden states are not finite, is left out."""
        length, prompt = len(sample.tokens), sample.prompt_length
        if length <= prompt or (sample.hidden is not None and not bool(sample.hidden[:-1].isfinite().all())):
            return
        self.seen += 1
        self.tokens += length - prompt
        place = place_of(sample.tokens[:prompt])
        self.first = min(self.first, place)
        if self._is_held_out(place):
            self._hold_out(replace(_row(sample, min(length, prompt + _WALKED)), place=place))
        else:
            row = _row(sample, length)
            self._rows.put(rank(sample.surprise, self.seen), row.nbytes, row)

    def take(self, count: int) -> list[RegeneratedText]:
        """Take the texts of a step: those that are worth most. Those that may be used again go back at a lower rank."""
        best = [found for _ in range(count) if (found := self._rows.take_best()) is not None]
        for worth, row in best:
            if row.uses + 1 < self._settings.uses:
                self._rows.put(worth - _USED, row.nbytes, _Row(row.text, row.nbytes, row.uses + 1))
        return [row.text for _, row in best]

    def _is_held_out(self, place: float) -> bool:
        """Whether a prompt is only measured on: the first of all is, though it need not be among the first share.

        A job of few prompts with many samples each would have none to measure on.
        """
        return place < self._settings.held_out_share or place == self.first

    def _hold_out(self, row: _Row) -> None:
        self._held_out = deque(one for one in self._held_out if self._is_held_out(one.place))
        held, most = self._held_out, self._settings.buffer_bytes // 4
        held.append(row)
        while len(held) > 1 and (len(held) > self._settings.held_out_rows or sum(one.nbytes for one in held) > most):
            held.popleft()


def place_of(prompt: Tensor) -> float:
    """The place in [0, 1] of a prompt `[P]` of token ids in an order of all prompts that is always the same."""
    digest = hashlib.blake2b(prompt.to(torch.int64).numpy().astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def micro_batches(texts: Sequence[RegeneratedText], tokens: int) -> list[list[RegeneratedText]]:
    """Divide the texts of a step so that each part, padded, has at most `tokens` tokens, or is a single text."""
    parts: list[list[RegeneratedText]] = []
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0].tokens) <= tokens:
            parts[-1].append(text)
        else:
            parts.append([text])
    return parts


def _row(sample: RowSample, length: int) -> _Row:
    """The first `length` tokens of a row. A state that means nothing is zero: masked positions are read, too."""
    hidden = None if sample.hidden is None else F.pad(sample.hidden[: length - 1], (0, 0, 0, 1))
    text = RegeneratedText(sample.tokens[:length].tolist(), sample.prompt_length, hidden)
    return _Row(text, 8 * length + (0 if hidden is None else hidden.nbytes))


# ---- Where an engine leaves rows for a learner: a few, in bounded memory, until somebody takes them.

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

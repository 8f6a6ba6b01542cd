"""Rows to learn from, in engines and in a learner: bounded memory, recent and surprising rows first."""

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

from drafter.engine.sequence import EndedRow
from drafter.methods.learning.settings import LearnerSettings
from drafter.training.targets import RegeneratedText

Row = TypeVar("Row")


@dataclass(frozen=True)
class RowSample:
    """A finished row, on the CPU; it can be pickled.

    Without hidden states, a learner runs the target model over the text. The last token's are undefined: nothing is
    drafted after it.
    """

    request_id: str
    tokens: Tensor  # `[T]` int64 prompt and output
    prompt_length: int  # at least 1
    hidden: Tensor | None  # `[T, K · d]` those that the head reads (`DraftHead.hidden_layers`)
    steps: int  # decode steps that the output took

    @property
    def surprise(self) -> float:
        """Decode steps per token, in (0, 1]: 1 / β, and 1 where no draft was right."""
        return min(self.steps / max(len(self.tokens) - self.prompt_length, 1), 1.0)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


_HALF_LIFE = 512.0  # a row ranks like one that came so many rows later and is half as surprising


def rank(surprise: float, arrival: int) -> float:
    """Return a row's worth for learning, as a logarithm to base 2, from its surprise and the rows that came before.

    Recency is additive, so the order of two rows never changes and a rank is a constant.
    """
    return math.log2(max(surprise, 1e-6)) + arrival / _HALF_LIFE


class RankedRows(Generic[Row]):
    """Keeps the rows of highest rank in `nbytes` bytes, of which `used` are taken."""

    def __init__(self, nbytes: int) -> None:
        self._limit, self.used = nbytes, 0
        self._rows: list[tuple[float, int, int, Row]] = []  # (rank, arrival, bytes, row), by rising rank
        self._count = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (row for *_, row in self._rows)

    def takes(self, rank: float, nbytes: int) -> bool:
        room = self._limit - self.used
        for lower, _, size, _ in self._rows:
            if room >= nbytes or lower >= rank:
                break
            room += size
        return room >= nbytes

    def put(self, rank: float, nbytes: int, row: Row) -> bool:
        """Keep a row, evicting rows of lower rank; False if that makes too little room."""
        if not self.takes(rank, nbytes):
            return False
        while self.used + nbytes > self._limit:
            self.used -= self._rows.pop(0)[2]
        self._count += 1  # a tie-breaker: rows have no order
        insort(self._rows, (rank, self._count, nbytes, row))
        self.used += nbytes
        return True

    def take_best(self) -> tuple[float, Row] | None:
        """Remove and return the row of the highest rank, with the rank; None if there is none."""
        if not self._rows:
            return None
        rank, _, nbytes, row = self._rows.pop()
        self.used -= nbytes
        return rank, row

    def clear(self) -> None:
        self._rows, self.used = [], 0


_USED = 0.5  # rank that a row loses by each use: like 256 rows of age
_WALKED = 256  # leading tokens of an answer that are measured


@dataclass(frozen=True)
class _Row:
    """A training row and its uses, or a held-out row and its prompt's `place_of`."""

    text: RegeneratedText
    nbytes: int
    uses: int = 0
    place: float = 0.0


class LearningRows:
    """The learner's training rows and held-out rows, in bounded memory."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._rows: RankedRows[_Row] = RankedRows(settings.buffer_bytes)
        self._held_out: deque[_Row] = deque()
        self.seen = self.tokens = 0  # usable rows so far, and their output tokens
        self.first = 1.0  # the smallest `place_of` of their prompts

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.used + sum(row.nbytes for row in self._held_out)

    @property
    def held_out(self) -> list[RegeneratedText]:
        return [row.text for row in self._held_out]

    def add(self, sample: RowSample) -> None:
        """Take a row, unless it has no output or its hidden states are not finite."""
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
        """Take the `count` highest-ranked texts. Those with uses left go back at a lower rank."""
        best = [found for _ in range(count) if (found := self._rows.take_best()) is not None]
        for worth, row in best:
            if row.uses + 1 < self._settings.uses:
                self._rows.put(worth - _USED, row.nbytes, _Row(row.text, row.nbytes, row.uses + 1))
        return [row.text for _, row in best]

    def _is_held_out(self, place: float) -> bool:
        """Decide by the prompt's hash. The smallest is always held out, for jobs of few prompts."""
        return place < self._settings.held_out_share or place == self.first

    def _hold_out(self, row: _Row) -> None:
        self._held_out = deque(one for one in self._held_out if self._is_held_out(one.place))
        held, most = self._held_out, self._settings.buffer_bytes // 4
        held.append(row)
        while len(held) > 1 and (len(held) > self._settings.held_out_rows or sum(one.nbytes for one in held) > most):
            held.popleft()


def place_of(prompt: Tensor) -> float:
    """Hash a prompt `[P]` of token ids to [0, 1], the same in all processes."""
    digest = hashlib.blake2b(prompt.to(torch.int64).numpy().astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def micro_batches(texts: Sequence[RegeneratedText], tokens: int) -> list[list[RegeneratedText]]:
    """Split the texts of a step into parts of at most `tokens` padded tokens each, or a single text."""
    parts: list[list[RegeneratedText]] = []
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0].tokens) <= tokens:
            parts[-1].append(text)
        else:
            parts.append([text])
    return parts


def _row(sample: RowSample, length: int) -> _Row:
    """Cut a row to `length` tokens. The last, undefined hidden state becomes zero: masked positions are read, too."""
    hidden = None if sample.hidden is None else F.pad(sample.hidden[: length - 1], (0, 0, 0, 1))
    text = RegeneratedText(sample.tokens[:length].tolist(), sample.prompt_length, hidden)
    return _Row(text, 8 * length + (0 if hidden is None else hidden.nbytes))


_NBYTES = 64 << 20  # memory for rows that have not been taken


_Pending = tuple[EndedRow, Tensor | None, torch.cuda.Event | None]


class SampleTap:
    """A `RowTap` that keeps the most recent and most surprising rows, up to `nbytes`, until a learner takes them."""

    def __init__(self, nbytes: int = _NBYTES) -> None:
        self._rows: RankedRows[_Pending] = RankedRows(nbytes)
        self._lock = threading.Lock()
        self._seen, self._paused = 0, False

    # Called on the engine's thread.

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        with self._lock:
            self._seen += 1
            return not self._paused and self._rows.takes(self._rank(row), nbytes + self._text_bytes(row))

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        nbytes = self._text_bytes(row) + (0 if hidden is None else hidden.nbytes)
        with self._lock:
            self._rows.put(self._rank(row), nbytes, (row, hidden, arrived))

    # Called from any thread.

    def take(self, nbytes: int) -> list[RowSample]:
        """Remove the highest-ranked rows until they have `nbytes` bytes together, or all."""
        found: list[_Pending] = []
        with self._lock:
            until = self._rows.used - nbytes
            while self._rows.used > max(until, 0) and (best := self._rows.take_best()) is not None:
                found.append(best[1])
        return [_sample(*one) for one in found]

    def pause(self) -> None:
        """Drop all rows and refuse new ones, so that nothing is copied."""
        with self._lock:
            self._paused = True
            self._rows.clear()

    def resume(self) -> None:
        with self._lock:
            self._paused = False

    def _rank(self, row: EndedRow) -> float:
        return rank(row.steps / max(len(row.output), 1), self._seen)

    @staticmethod
    def _text_bytes(row: EndedRow) -> int:
        return 8 * row.length


def _sample(row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> RowSample:
    if arrived is not None:
        arrived.synchronize()
    tokens = torch.from_numpy(np.array([*row.prompt, *row.output], dtype=np.int64))
    return RowSample(row.request_id, tokens, len(row.prompt), hidden, row.steps)

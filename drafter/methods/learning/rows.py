"""Rows to learn from, in engines and in a learner: bounded memory, the newest rows first."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.methods.learning.settings import LearnerSettings
from drafter.parts.learning import EndedRow
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


class NewestRows(Generic[Row]):
    """Keeps the newest rows in `limit` bytes, of which `used` are taken."""

    def __init__(self, limit: int) -> None:
        self._limit, self.used = limit, 0
        self._rows: deque[tuple[int, Row]] = deque()  # (bytes, row), the newest last

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, nbytes: int, row: Row) -> None:
        """Keep a row, and drop the oldest ones, or itself if it is too large."""
        self._rows.append((nbytes, row))
        self.used += nbytes
        while self.used > self._limit:
            self.used -= self._rows.popleft()[0]

    def put_back(self, nbytes: int, row: Row) -> None:
        """Keep a row that was taken, as the oldest one."""
        self._rows.appendleft((nbytes, row))
        self.used += nbytes

    def take(self) -> tuple[int, Row]:
        """Remove and return the newest row, with its bytes; raise IndexError if there is none."""
        nbytes, row = self._rows.pop()
        self.used -= nbytes
        return nbytes, row


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
        self._rows: NewestRows[_Row] = NewestRows(settings.buffer_bytes)
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
            self._rows.put(row.nbytes, row)

    def take(self, count: int) -> list[RegeneratedText]:
        """Take the `count` newest texts. Those with uses left go back, behind all others."""
        taken = [self._rows.take() for _ in range(min(count, len(self._rows)))]
        for nbytes, row in taken:
            if row.uses + 1 < self._settings.uses:
                self._rows.put_back(nbytes, replace(row, uses=row.uses + 1))
        return [row.text for _, row in taken]

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
    """A `RowTap` that keeps the newest rows, up to `nbytes`, until a learner takes them."""

    def __init__(self, nbytes: int = _NBYTES) -> None:
        self._limit, self._paused = nbytes, False
        self._rows: NewestRows[_Pending] = NewestRows(nbytes)
        self._lock = threading.Lock()

    # Called on the engine's thread.

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        return not self._paused and _text_bytes(row) + nbytes <= self._limit

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        with self._lock:
            self._rows.put(_text_bytes(row) + (0 if hidden is None else hidden.nbytes), (row, hidden, arrived))

    # Called from any thread.

    def take(self, nbytes: int) -> list[RowSample]:
        """Remove the newest rows until they have `nbytes` bytes together, or all."""
        found: list[_Pending] = []
        with self._lock:
            until = max(self._rows.used - nbytes, 0)
            while self._rows.used > until:
                found.append(self._rows.take()[1])
        return [_sample(*one) for one in found]

    def pause(self) -> None:
        """Drop all rows and refuse new ones, so that nothing is copied."""
        with self._lock:
            self._paused = True
            self._rows = NewestRows(self._limit)

    def resume(self) -> None:
        self._paused = False


def _text_bytes(row: EndedRow) -> int:
    return 8 * row.length


def _sample(row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> RowSample:
    if arrived is not None:
        arrived.synchronize()
    tokens = torch.from_numpy(np.array([*row.prompt, *row.output], dtype=np.int64))
    return RowSample(row.request_id, tokens, len(row.prompt), hidden)

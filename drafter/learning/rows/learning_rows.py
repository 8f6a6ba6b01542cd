"""The rows that a learner has: those it learns from, and a few prompts that it only measures on."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.learning.contract import RowSample
from drafter.learning.learner_settings import LearnerSettings
from drafter.learning.rows.ranked_rows import RankedRows, rank
from drafter.training.targets import RegeneratedText

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

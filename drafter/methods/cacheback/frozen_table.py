"""N-gram tables of a corpus: lookup, and the file format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from drafter.errors import LoadError, first_line

Gram = tuple[int, ...]


class Table(ABC):
    """Maps *leaders*, `leader_length` last tokens of a text, to *followers*, tokens that came after them."""

    leader_length: int

    @abstractmethod
    def followers(self, leader: Gram) -> Iterator[Gram]:
        """Yield a leader's followers, likeliest first."""


_FORMAT = "drafter-ngram-table-1"
_KINDS = {"leaders": (1, np.int32), "offsets": (1, np.int64), "continuations": (2, np.int32)}
"""Dimensions and dtypes of the arrays."""


@dataclass(frozen=True)
class FrozenTable(Table):
    """A read-only table of `leaders` `[L]`, ascending single tokens, and their followers, the most frequent first.

    The followers of leader `i` are `continuations[offsets[i] : offsets[i + 1]]` `[F, U]`.
    """

    leaders: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    continuations: npt.NDArray[np.int32]
    leader_length: int = field(default=1, init=False)

    def __len__(self) -> int:
        return len(self.leaders)

    def followers(self, leader: Gram) -> Iterator[Gram]:
        if not leader:  # the beginning of a text
            return
        place = int(self.leaders.searchsorted(leader[0]))
        if place < len(self.leaders) and self.leaders[place] == leader[0]:
            yield from map(tuple, self.continuations[self.offsets[place] : self.offsets[place + 1]].tolist())


def table_bytes(table: FrozenTable, vocabulary: str, provenance: Mapping[str, Any]) -> bytes:
    """Return a table's file; `vocabulary` is the digest of the vocabulary of its token ids."""
    metadata = {"format": _FORMAT, "vocabulary": vocabulary, "provenance": json.dumps(provenance)}
    arrays = {name: np.ascontiguousarray(getattr(table, name), kind) for name, (_, kind) in _KINDS.items()}
    return bytes(save(arrays, metadata))


def load_table(path: str | Path, vocabulary: str, vocab_size: int) -> FrozenTable:
    """Load a table; raise `LoadError` if it is missing or damaged, or of another tokeniser's vocabulary."""
    if read_metadata(path)["vocabulary"] != vocabulary:
        raise LoadError(f"table {str(path)!r} is of another tokeniser: make one with python -m recipes.cacheback")
    try:
        with safe_open(Path(path).expanduser(), framework="numpy") as opened:
            table = FrozenTable(**{name: opened.get_tensor(name) for name in _KINDS})
        _check(table, vocab_size)
    except (OSError, SafetensorError, ValueError) as error:
        raise LoadError(
            f"table {str(path)!r} is damaged: {first_line(error)}: make it again with python -m recipes.cacheback"
        ) from error
    return table


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read a table's metadata; raise `LoadError` if the file is missing, or no table."""
    try:
        with safe_open(Path(path).expanduser(), framework="numpy") as opened:
            metadata = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{str(path)!r} is no table of recipes.cacheback: {first_line(error)}") from error
    if metadata.get("format") != _FORMAT:
        raise LoadError(f"{str(path)!r} is no table of recipes.cacheback, whose format is {_FORMAT!r}")
    return metadata


def _check(table: FrozenTable, vocab_size: int) -> None:
    """Raise `ValueError` for a damaged table, which would fail in the middle of a job."""
    leaders, offsets, followers = (getattr(table, name) for name in _KINDS)
    if [(one.ndim, one.dtype) for one in (leaders, offsets, followers)] != list(_KINDS.values()):
        raise ValueError("its arrays have other dimensions or types")
    right_ends = len(offsets) == len(leaders) + 1 and offsets[0] == 0 and offsets[-1] == len(followers)
    if not right_ends or (np.diff(offsets) < 0).any() or not followers.shape[1]:
        raise ValueError("its offsets do not fit its leaders and followers")
    if (np.diff(leaders) <= 0).any():
        raise ValueError("its leaders do not rise")
    for tokens in (leaders, followers):
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"it has token ids outside of 0 to {vocab_size - 1}")

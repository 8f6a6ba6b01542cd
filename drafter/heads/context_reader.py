"""KV cache of every slot's context, which draft modules with attention extend step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter import devices
from drafter.drafters.contract import DraftContext, Ids
from drafter.heads.frame_head import SlotReader
from drafter.target.model import BaseModel

_CONTEXT_BUCKET = 64
"""Context lengths are rounded up to a multiple of this, so that shapes repeat."""
_PROMPT_ENTRIES = 4096
"""Most prompt entries read in one forward."""


@dataclass(frozen=True)
class Entries:
    """Entries of several slots' texts, in one list.

    Args:
        slots: `[E]` slot of each entry.
        back: `[E]` distance of each entry from its slot's pending token.
    """

    slots: Tensor
    back: Tensor


@dataclass(frozen=True)
class CacheShape:
    """Size of the cache.

    Args:
        heads: Key heads of a layer.
        size: D, width of a head.
        behind: Positions after the pending token's that the module writes to.
    """

    layers: int
    heads: int
    size: int
    behind: int = 0


class ContextReader(SlotReader, ABC):
    """Reads each sequence's new tokens, ordinarily at most `fresh` per step, into a KV cache, which is allocated once.

    An entry is a token and the target model's hidden state before it, and depends on nothing else.
    """

    bounded = True

    def __init__(self, base: BaseModel, fresh: int, shape: CacheShape) -> None:
        self._base, self._shape = base, shape
        self.bytes_per_token = 2 * shape.layers * shape.heads * shape.size * base.dtype.itemsize
        self._cached: list[int] = []  # cached entries of each slot
        # The host of a GPU is a step behind and does not know how many entries are new. There a step takes the same
        # number of entries from every row, enough for two steps.
        self._behind = devices.is_asynchronous(base.device)
        self._usual = 2 * fresh if self._behind else fresh
        self._new = np.zeros(0, dtype=np.int64)  # entries of each row that the next step has to read

    @abstractmethod
    def _remember(self, context: DraftContext, entries: Entries) -> None:
        """Read entries into the cache."""

    @abstractmethod
    def _rotation_table(self, length: int) -> Tensor:
        """Return cosine and signed sine of positions `0..length-1`, `[length, 2, D]`."""

    def open(self, slots: int, length: int) -> None:
        shape, device, dtype = self._shape, self._base.device, self._base.dtype
        self._length = length + shape.behind + 1
        self._cache = torch.zeros(
            shape.layers, 2, slots * self._length, shape.heads, shape.size, device=device, dtype=dtype
        )
        self._rotation = self._rotation_table(self._length)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(slots, device=device)
        self._cached = [0] * slots

    def enter(self, slot: int) -> None:
        self._cached[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        # An entry follows from its token and the hidden state before it, so texts that begin alike share entries.
        known = min(self._cached[source], length)
        texts = self._cache.unflatten(2, (-1, self._length))
        texts[:, :, target, :known] = texts[:, :, source, :known]
        self._cached[target] = known

    def move(self, source: int, target: int) -> None:
        self.copy(source, target, self._cached[source])

    def clear(self, slot: int) -> None:
        self._cache.unflatten(2, (-1, self._length))[:, :, slot] = 0

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new entries than an ordinary step reads."""
        known = np.array(context.host_lengths, dtype=np.int64)
        new = known + (context.ahead + 1) - np.array(self._cached[: len(known)], dtype=np.int64)
        late = new > self._usual
        if late.any():
            slots, back = _last_entries(late.nonzero()[0], new[late])
            for first in range(0, len(slots), _PROMPT_ENTRIES):
                some = slice(first, first + _PROMPT_ENTRIES)
                self._remember(context, self._sent(slots[some], back[some]))
        # The step reads the pending token's entry in any case, because drafting starts from it.
        self._new = np.where(late, 1, new.clip(1))
        self._cached[: len(known)] = (known + 1).tolist()

    def _texts(self, rows: int, longest: int) -> Tensor:
        """Return the cache of `rows` rows, with room for `longest` entries, `[layers, 2, rows, S, H, D]`."""
        bound = min(-(-longest // _CONTEXT_BUCKET) * _CONTEXT_BUCKET, self._length)
        texts: Tensor = self._cache.unflatten(2, (-1, self._length))
        return texts[:, :, :rows, :bound]

    def _store(self, places: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[1, E, H, D]` to `places` `[E]` of the flattened cache."""
        self._cache[layer, 0].index_copy_(0, places, keys[0])
        self._cache[layer, 1].index_copy_(0, places, values[0])

    def _inputs(self, context: DraftContext, entries: Entries) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions `[E]`, embeddings `[E, d]` and the hidden states before the entries `[E, K · d]`.

        The hidden state before the beginning of a text is zero.
        """
        assert context.hidden is not None
        slots = entries.slots
        # A text shorter than `_usual` has its first entry asked for several times; it is the same each time.
        positions = (context.lengths[slots] - entries.back).clamp_min(0)
        hidden = context.hidden[slots, (positions - 1).clamp_min(0)].to(self._base.dtype) * (positions > 0)[:, None]
        return positions, self._base.embed(context.tokens[slots, positions]), hidden

    def _recent(self, rows: int) -> tuple[Entries, Tensor]:
        """Return the possibly new entries of `rows` rows, and the indices of the pending tokens' entries, `[rows]`."""
        if not self._behind:
            return self._sent(*_last_entries(np.arange(rows), self._new)), torch.from_numpy(self._new.cumsum() - 1)
        back = torch.arange(self._usual - 1, -1, -1, device=self._slot.device)
        slots = self._slot[:rows, None].expand(-1, self._usual)
        return Entries(slots.flatten(), back.repeat(rows)), (self._slot[:rows] + 1) * self._usual - 1

    def _sent(self, slots: Ids, back: Ids) -> Entries:
        device = self._base.device
        return Entries(*(devices.send(torch.from_numpy(part), device) for part in (slots, back)))


def _last_entries(slots: Ids, counts: Ids) -> tuple[Ids, Ids]:
    """Return slots and distances from the pending token of the last `counts` `[B]` entries of `slots` `[B]`."""
    ends = counts.cumsum()
    return slots.repeat(counts), ends.repeat(counts) - 1 - np.arange(counts.sum())

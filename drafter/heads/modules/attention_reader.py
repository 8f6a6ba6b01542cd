"""The attention draft module in decoding: a KV cache of the fused context, extended step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.base.prefix_attention import Prefix, parts_of, prefix_attention_agrees, prefix_attention_on
from drafter.drafters.contract import DraftContext, Ids
from drafter.heads.modules.attention_layers import AttentionLayers
from drafter.heads.modules.contract import FrameReader

_CONTEXT_BUCKET = 64
"""Context lengths are rounded up to a multiple of this, so that shapes repeat."""
_PROMPT_ENTRIES = 4096
"""Prompt entries that are read in one forward at most."""


@dataclass(frozen=True)
class Entries:
    """Entries of the texts of several slots, in one list.

    Args:
        slots: `[E]` slot of each entry.
        back: `[E]` distance of each entry from its slot's pending token.
    """

    slots: Tensor
    back: Tensor


class AttentionReader(FrameReader):
    """Reads each sequence's new tokens into a KV cache, which is allocated once, and computes the frames.

    Args:
        module: The layers, on the base's device and in its dtype.
        base: Lends its embedding.
        fresh: Tokens that an ordinary step adds to a sequence at most.
    """

    def __init__(self, module: AttentionLayers, base: BaseModel, fresh: int) -> None:
        self._module, self._base = module, base
        self.bytes_per_token = 2 * len(module.layers) * module.width * base.dtype.itemsize
        heads, dim = module.num_heads, module.width // module.num_heads
        attend = prefix_attention_on(base.device, base.dtype)
        # All frames of a text see the same of it, so that they need no mask where something reads to its end.
        proved = attend and prefix_attention_agrees(attend, heads, dim, base.device, base.dtype)
        self._attend, self.bounded = (attend, False) if proved else (None, True)
        self._cached: list[int] = []  # entries of each slot whose keys and values are in the cache
        # The host of a GPU is a step behind and does not know how many entries are new. There `read` takes the same
        # number of entries from every row, enough for two steps.
        self._behind = devices.is_asynchronous(base.device)
        self._usual = 2 * fresh if self._behind else fresh
        self._new = np.zeros(0, dtype=np.int64)  # entries of each row that `read` has to read

    def open(self, slots: int, length: int) -> None:
        """Allocate the cache."""
        module, device, dtype = self._module, self._base.device, self._base.dtype
        self._length = length + module.num_frames + 1
        shape = (len(module.layers), 2, slots * self._length, module.num_heads, module.width // module.num_heads)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._rotation = module.rotation(self._length, device, dtype)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(slots, device=device)
        self._cached = [0] * slots

    def enter(self, slot: int) -> None:
        """Forget the sequence that was in `slot`."""
        self._cached[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the entries of the first `length` tokens that are in the cache."""
        # An entry follows from its token and the hidden state before it, so texts that begin alike share entries.
        known = min(self._cached[source], length)
        texts = self._cache.unflatten(2, (-1, self._length))
        texts[:, :, target, :known] = texts[:, :, source, :known]
        self._cached[target] = known

    def move(self, source: int, target: int) -> None:
        """Copy all entries."""
        self.copy(source, target, self._cached[source])

    def clear(self, slot: int) -> None:
        """Set the slot's keys and values to zero."""
        self._cache.unflatten(2, (-1, self._length))[:, :, slot] = 0

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new entries than an ordinary step brings; leave the others to `read`."""
        known = np.array(context.host_lengths, dtype=np.int64)
        new = known + (context.ahead + 1) - np.array(self._cached[: len(known)], dtype=np.int64)
        late = new > self._usual
        if late.any():
            slots, back = _last_entries(late.nonzero()[0], new[late])
            for first in range(0, len(slots), _PROMPT_ENTRIES):
                some = slice(first, first + _PROMPT_ENTRIES)
                self._remember(context, self._sent(slots[some], back[some]))
        # `read` reads the pending token's entry in any case, because the frames start from it.
        self._new = np.where(late, 1, new.clip(1))
        self._cached[: len(known)] = (known + 1).tolist()

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Read the new entries and return the first `count` frames, or all, `[B, F, d]`."""
        module, rows = self._module, context.tokens.shape[0]
        frames = count or module.num_frames
        entries, ends = self._recent(rows)
        positions, fused = self._fused(context, entries)
        ahead = context.lengths[:, None] + torch.arange(1, frames + 1, device=positions.device)
        # The frames' own keys and values go behind the pending token's, where later entries overwrite them.
        places = torch.cat(
            [positions + entries.slots * self._length, (ahead + self._slot[:rows, None] * self._length).flatten()]
        )
        seen: Tensor | Prefix
        if self._attend is not None:
            parts = parts_of(rows, module.num_heads, frames, self._length)
            seen, texts = Prefix(context.lengths + (frames + 1), self._length, parts, self._attend), self._cache
        else:
            bound = -(-(context.longest + 1 + frames) // _CONTEXT_BUCKET) * _CONTEXT_BUCKET
            bound = min(bound, self._length)
            seen = (self._place[:bound] <= context.lengths[:, None] + frames)[:, None, None]
            texts = self._cache.unflatten(2, (-1, self._length))[:, :, :rows, :bound]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._store(places, layer, keys, values)
            return texts[layer, 0], texts[layer, 1]

        rotation = self._rotation[torch.cat([positions, ahead.flatten()])]
        return module.frames(fused[None], fused[None, ends], frames, rotation[None], seen, memory)[0]

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        """Read entries without computing frames after them."""
        positions, fused = self._fused(context, entries)
        store = partial(self._store, positions + entries.slots * self._length)
        self._module.remember(fused[None], self._rotation[positions][None], store)

    def _store(self, places: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[1, E, H, D]` to `places` `[E]` of the flattened cache."""
        self._cache[layer, 0].index_copy_(0, places, keys[0])
        self._cache[layer, 1].index_copy_(0, places, values[0])

    def _fused(self, context: DraftContext, entries: Entries) -> tuple[Tensor, Tensor]:
        """Return the positions `[E]` of entries and the fused entries `[E, d]`."""
        assert context.hidden is not None
        slots = entries.slots
        # A text shorter than `_usual` has its first entry asked for several times; it is the same each time.
        positions = (context.lengths[slots] - entries.back).clamp_min(0)
        hidden = context.hidden[slots, (positions - 1).clamp_min(0)].to(self._base.dtype) * (positions > 0)[:, None]
        return positions, self._module.fuse(self._base.embed(context.tokens[slots, positions]), hidden)

    def _recent(self, rows: int) -> tuple[Entries, Tensor]:
        """Return the entries that `rows` rows may have new, and which of them belong to pending tokens, `[rows]`."""
        if not self._behind:
            return self._sent(*_last_entries(np.arange(rows), self._new)), torch.from_numpy(self._new.cumsum() - 1)
        back = torch.arange(self._usual - 1, -1, -1, device=self._slot.device)
        slots = self._slot[:rows, None].expand(-1, self._usual)
        return Entries(slots.flatten(), back.repeat(rows)), (self._slot[:rows] + 1) * self._usual - 1

    def _sent(self, slots: Ids, back: Ids) -> Entries:
        """Return entries on the device."""
        device = self._base.device
        return Entries(*(devices.send(torch.from_numpy(part), device) for part in (slots, back)))


def _last_entries(slots: Ids, counts: Ids) -> tuple[Ids, Ids]:
    """Return slots and distances from the pending token of the last `counts` `[B]` entries of `slots` `[B]`."""
    ends = counts.cumsum()
    return slots.repeat(counts), ends.repeat(counts) - 1 - np.arange(counts.sum())

"""A KV cache whose rows take memory as they grow, in blocks (PagedAttention, arXiv 2309.06180).

Rows of different lengths then share a memory that would hold far fewer rows of the greatest length. The native executor
finds the blocks itself. Other executors read a copy of the rows, made layer by layer, which costs them time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter import devices
from drafter.target.kv_cache import KVCache, LayerShape, Places

BLOCK = 32
"""Positions of a block."""
_ZEROS, _STRAY = 0, 1
"""Reserved blocks: always zero, read where a slot has no block; and a sink for writes there."""
SPARE = 2
"""Number of reserved blocks."""


class PagedKVCache(KVCache):
    """Keys and values of `slots` rows of up to `length` positions that share `blocks` blocks. See `KVCache`.

    A slot must have `reserve`d a position before it is written. What is written elsewhere, as empty slots are in a step
    that runs over them, is lost, and zeros are read there.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        slots: Rows.
        length: Positions a row can hold, draft nodes included.
        device: Where positions come from.
        blocks: Blocks of all rows together; at least as many as one row of `length` positions takes.
    """

    in_order = False

    def __init__(
        self, shapes: list[LayerShape | None], slots: int, length: int, device: torch.device, blocks: int
    ) -> None:
        super().__init__(shapes, slots, length, device, positions=(blocks + SPARE) * BLOCK)
        self.block, self.blocks = BLOCK, torch.zeros(slots, blocks_of(length), dtype=torch.long)
        self._on_device = self.blocks.to(device)  # on a CPU the same memory
        self._offsets = torch.arange(length, device=device)[None]
        self._held = [0] * slots
        self._free = list(range(blocks + SPARE - 1, SPARE - 1, -1))

    def reserve(self, slot: int, positions: int) -> bool:
        """Let a slot hold so many positions; False, and nothing done, if too few blocks are left."""
        held, wanted = self._held[slot], blocks_of(min(positions, self.length))
        if wanted <= held:
            return True
        if wanted - held > len(self._free):
            return False
        self.blocks[slot, held:wanted] = torch.tensor([self._free.pop() for _ in range(held, wanted)])
        self._held[slot] = wanted
        self._send([slot])
        return True

    def has_room(self, positions: int, rows: int) -> bool:
        """Return whether a new row may hold so many positions, and a block is left for each of the `rows` there are."""
        return blocks_of(min(positions, self.length)) + rows <= len(self._free)

    def release(self, slot: int) -> None:
        """Give a slot's blocks back."""
        held = self._held[slot]
        if held:
            self._free += self.blocks[slot, :held].tolist()[::-1]
            self.blocks[slot] = self._held[slot] = 0
            self._send([slot])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`, which has reserved them."""
        source_row, target_row = slice(source, source + 1), slice(target, target + 1)
        positions = self._offsets[:, :length]
        self._copy(self._places(source_row, positions)[0], self._places(target_row, positions)[0])

    def move(self, source: int, target: int, length: int) -> None:
        """Let two slots change places. Nothing is copied."""
        both, other = [source, target], [target, source]
        self.blocks[both] = self.blocks[other]
        self._held[source], self._held[target] = self._held[target], self._held[source]
        self._send(both)

    def clear(self, slot: int) -> None:
        """Set all positions of a slot's blocks to zero."""
        for buffer in self.buffers:
            in_blocks = buffer.unflatten(0, (-1, self._positions // BLOCK, BLOCK))
            in_blocks.index_fill_(1, devices.send(self.blocks[slot, : self._held[slot]].clone(), buffer.device), 0)

    def _send(self, slots: list[int]) -> None:
        """Let the device know of these slots' blocks."""
        if self._on_device is not self.blocks:
            for slot in slots:
                self._on_device[slot] = devices.send(self.blocks[slot].clone(), self.device)

    def _places(self, rows: slice, positions: Tensor) -> Tensor:
        blocks = self._on_device[rows].gather(1, positions // BLOCK)
        return blocks * BLOCK + positions % BLOCK

    def _places_to_write(self, rows: slice, positions: Tensor) -> Tensor:
        places = self._places(rows, positions)
        return torch.where(places // BLOCK == _ZEROS, places + (_STRAY - _ZEROS) * BLOCK, places)

    def _places_on_host(self, rows: Places, positions: Places) -> Places:
        return self.blocks.numpy()[rows, positions // BLOCK] * BLOCK + positions % BLOCK

    def _unused_places(self, rows: slice) -> Tensor:
        return self._offsets[:, :1].expand(rows.stop - rows.start, 1)

    def _reads(self, rows: slice, kv_length: int) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
        whole = [buffer.unflatten(0, (-1, self._positions)).unbind(0) for buffer in self.buffers]
        return whole, self._places(rows, self._offsets[:, :kv_length].expand(rows.stop - rows.start, -1))


def blocks_of(positions: int) -> int:
    """Return how many blocks hold so many positions."""
    return -(-positions // BLOCK)

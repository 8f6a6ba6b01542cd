"""The contract of the target model's cache: what its layers keep of each slot's text, and on which places.

A forward writes the state of its nodes beside that of the committed text; `commit` makes the accepted nodes' state the
text's. A row's committed length is kept by the caller, and is changed last: whatever fails before leaves the state that
belongs to the old length. State by position (keys and values) has this by itself, as it is written behind the length.
State that is not by position (a recurrent layer's) needs two buffers, and the length to which each belongs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices
from drafter.target_model.nodes import Nodes

Places = npt.NDArray[np.int64]
BLOCK = 32  # positions of a block
_ZEROS, _STRAY = 0, 1  # reserved blocks: always zero, read where a slot has no block; and a sink for writes there
SPARE = 2  # number of reserved blocks


class Blocks:
    """Owns the places of all that is kept by position: here one block of full length for each slot.

    Attributes:
        size: Contiguous positions of a block.
        table: `[slots, n]` int64 blocks of each slot, on the host.
        places: Positions of all blocks together.
    """

    in_order = True
    """A slot's positions are contiguous, in the order of slots."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.slots, self.length, self.device = slots, length, device
        self.size, self.table, self.places = length, torch.arange(slots)[:, None], slots * length
        self._starts = torch.arange(slots, device=device) * length

    def reserve(self, slot: int, positions: int) -> bool:
        """Reserve `positions` for a slot; return False, and change nothing, if too little memory is left."""
        return True

    def has_room(self, positions: int, rows: int) -> bool:
        """Return whether a new row of `positions` fits and leaves room for the present `rows` to grow."""
        return True

    def release(self, slot: int) -> None:
        """Free the slot's memory."""

    def swap(self, one: int, other: int) -> None:
        """Exchange what two slots hold, if they hold blocks; slots that are `in_order` keep their places."""

    def of(self, rows: slice, positions: Tensor) -> Tensor:
        """Map `positions` `[R, n]` within slots `rows` to places, `[R, n]`."""
        return positions + self._starts[rows, None]

    def to_write(self, rows: slice, positions: Tensor) -> Tensor:
        """Map positions that the slots may not have reserved."""
        return self.of(rows, positions)

    def on_host(self, rows: Places, positions: Places) -> Places:
        """Map `positions` `[n]` within slots `rows` `[n]`."""
        return rows * self.length + positions

    def unused(self, rows: slice) -> Tensor:
        """Return `[R, 1]` a place for each slot that never holds a token."""
        return self._starts[rows, None] + (self.length - 1)


class GrowingBlocks(Blocks):
    """Blocks that rows take as they grow (PagedAttention, arXiv 2309.06180).

    Rows of different lengths then share a memory that would hold far fewer rows of the greatest length. The native
    executor finds the blocks itself; others read a copy of the rows, made layer by layer, which costs time.

    A slot must have `reserve`d a position before it is written. Writes elsewhere, as to the empty slots of a step, are
    lost, and zeros are read there.

    Args:
        count: Blocks of all rows together; at least as many as one row of `length` positions takes.
    """

    in_order = False

    def __init__(self, slots: int, length: int, device: torch.device, count: int) -> None:
        super().__init__(slots, length, device)
        self.size, self.places = BLOCK, (count + SPARE) * BLOCK
        self.table = torch.zeros(slots, blocks_of(length), dtype=torch.long)
        self._on_device = self.table.to(device)  # on a CPU the same memory
        self.held = [0] * slots  # blocks of each slot
        self._free = list(range(count + SPARE - 1, SPARE - 1, -1))

    def reserve(self, slot: int, positions: int) -> bool:
        held, wanted = self.held[slot], blocks_of(min(positions, self.length))
        if wanted <= held:
            return True
        if wanted - held > len(self._free):
            return False
        self.table[slot, held:wanted] = torch.tensor([self._free.pop() for _ in range(held, wanted)])
        self.held[slot] = wanted
        self._send([slot])
        return True

    def has_room(self, positions: int, rows: int) -> bool:
        return blocks_of(min(positions, self.length)) + rows <= len(self._free)

    def release(self, slot: int) -> None:
        held = self.held[slot]
        if held:
            self._free += self.table[slot, :held].tolist()[::-1]
            self.table[slot] = self.held[slot] = 0
            self._send([slot])

    def swap(self, one: int, other: int) -> None:
        both, exchanged = [one, other], [other, one]
        self.table[both] = self.table[exchanged]
        self.held[one], self.held[other] = self.held[other], self.held[one]
        self._send(both)

    def of(self, rows: slice, positions: Tensor) -> Tensor:
        blocks = self._on_device[rows].gather(1, positions // BLOCK)
        return blocks * BLOCK + positions % BLOCK

    def to_write(self, rows: slice, positions: Tensor) -> Tensor:
        places = self.of(rows, positions)
        return torch.where(places // BLOCK == _ZEROS, places + (_STRAY - _ZEROS) * BLOCK, places)

    def on_host(self, rows: Places, positions: Places) -> Places:
        return self.table.numpy()[rows, positions // BLOCK] * BLOCK + positions % BLOCK

    def unused(self, rows: slice) -> Tensor:
        return torch.zeros(rows.stop - rows.start, 1, dtype=torch.long, device=self.device)

    def _send(self, slots: list[int]) -> None:
        if self._on_device is not self.table:
            for slot in slots:
                self._on_device[slot] = devices.send(self.table[slot].clone(), self.device)


def blocks_of(positions: int) -> int:
    return -(-positions // BLOCK)


class Rows:
    """Tensors `[slots, length, ...]` with an entry for each position."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.slots = tensors, len(tensors[0]) if tensors else 0

    def copy(self, source: int, target: int, length: int) -> int:
        """See `TargetCache.copy`."""
        for rows in self.tensors:
            rows[target, :length] = rows[source, :length]
        return length

    def clear(self, slot: int, length: int | None = None) -> None:
        """See `LayerCache.clear`."""
        for rows in self.tensors:
            rows[slot, :length] = 0


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that layers keep, whose sums say how large a cache will be before there is one."""

    position: int = 0  # of a position of a slot's text
    slot: int = 0  # of a slot, however long its text is
    node: int = 0  # of a node of a step, until this is committed
    row: int = 0  # of a row of a step, however many nodes it has, until this is committed
    once: int = 0  # however many slots there are

    def __add__(self, other: CacheBytes) -> CacheBytes:
        return CacheBytes(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))


class LayerView(CacheLayerMixin):
    """What a layer sees of its cache in one forward, of texts of up to `length` tokens. See `LayerCache.views`.

    transformers asks for more of a cache's layer. The models do not use it, as masks and positions are passed in.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._length


class LayerCache(ABC):
    """What layers of one kind keep: a room of `TargetCache`, which tells it of every event."""

    @property
    @abstractmethod
    def bytes(self) -> CacheBytes:
        """What it takes for each position, slot, node and row."""

    def enter(self, slot: int, salt: str) -> None:  # noqa: B027 - most layers need not know
        """Note whose text is read next in a slot."""

    @abstractmethod
    def views(self, nodes: Nodes, apart: Collection[int]) -> Mapping[int, LayerView]:
        """Return what layers see of it in one forward, by number of the layer; see `TargetCache.view`.

        A view's `update` takes what the layer has computed of the nodes, packed as these are, and returns what it
        reads. Nothing of the committed texts may change before `commit`, but by `PromptNodes`.
        """

    @abstractmethod
    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        """Append the accepted nodes of the last forward to slots `rows`; see `TargetCache.commit`."""

    @abstractmethod
    def shareable(self, source: int, length: int) -> int:
        """Return the greatest number of a slot's first positions, up to `length`, whose state is known; 0 for none."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot, a number that is `shareable`, to another."""

    @abstractmethod
    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of slot `source` to slot `target`."""

    @abstractmethod
    def clear(self, slot: int, length: int | None = None) -> None:
        """Zero a slot, or what belongs to its first `length` positions."""

    @abstractmethod
    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Zero what the step left behind `lengths` `[R]` of the slots `rows` where `which` `[R]` is true."""

    @abstractmethod
    def zero(self) -> None:
        """Zero all slots."""


class TargetCache:
    """Cache of `slots` rows of up to `length` positions, of all layers of a model, or of its first ones.

    Args:
        layers: Its rooms. Where two have a view of the same layer, the later one counts.
        depth: Number of the model's layers that a forward with this cache runs.
    """

    def __init__(self, blocks: Blocks, layers: Sequence[LayerCache], depth: int) -> None:
        self.blocks, self.layers, self.depth = blocks, layers, depth
        self.slots, self.length = blocks.slots, blocks.length

    @property
    def bytes(self) -> CacheBytes:
        return sum((layer.bytes for layer in self.layers), CacheBytes())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, without those of a step's nodes and rows."""
        return self.bytes.position * self.blocks.places + self.bytes.slot * self.slots + self.bytes.once

    def enter(self, slot: int, salt: str) -> None:
        """Note whose text is read next in a slot."""
        for layer in self.layers:
            layer.enter(slot, salt)

    def view(self, nodes: Nodes, apart: Collection[int] = ()) -> Cache:
        """Return the cache as the model sees it in one forward.

        Args:
            apart: Layers that get back only the new nodes' keys and values; they read the others themselves.
        """
        views: dict[int, LayerView] = {}
        for layer in self.layers:
            views.update(layer.views(nodes, apart))
        return Cache(layers=[views[number] for number in range(len(views))])

    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        """Append the accepted paths of slots `rows` to their `lengths` `[R]` committed positions.

        `path` `[R, K]` are node ids, 0 and rising along each path; entries past a path's end are 0.
        """
        for layer in self.layers:
            layer.commit(lengths, path, rows)

    def shareable(self, source: int, length: int) -> int:
        """Return the greatest number of a slot's first positions, up to `length`, that can be copied; 0 for none."""
        while length and (least := min(layer.shareable(source, length) for layer in self.layers)) < length:
            length = least  # which not all of the others may know
        return length

    def copy(self, source: int, target: int, length: int) -> int:
        """Copy the first positions of a slot, up to `length`; return how many the two share now."""
        if shared := self.shareable(source, length):
            for layer in self.layers:
                layer.copy(source, target, shared)
        return shared

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of slot `source` to slot `target`."""
        for layer in self.layers:
            layer.move(source, target, length)
        self.blocks.swap(source, target)

    def clear(self, slot: int, length: int | None = None) -> None:
        """Zero a slot, or its first `length` positions at least."""
        for layer in self.layers:
            layer.clear(slot, length)

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Zero the `nodes` draft positions behind `lengths` `[R]` of the slots `rows` where `which` `[R]` is true."""
        for layer in self.layers:
            layer.scrub(lengths, nodes, which, rows)

    def zero(self) -> None:
        """Zero all slots, as if nobody had used them."""
        for layer in self.layers:
            layer.zero()

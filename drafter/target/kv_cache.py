"""The target model's KV cache: fixed-size slots, or blocks that rows take as they grow. All use of transformers'
cache classes is here, because their signatures change between releases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices

Places = npt.NDArray[np.int64]
BLOCK = 32  # positions of a block
_ZEROS, _STRAY = 0, 1  # reserved blocks: always zero, read where a slot has no block; and a sink for writes there
SPARE = 2  # number of reserved blocks


@dataclass(frozen=True)
class LayerShape:
    """Cached numbers of one layer per position: `heads` × `key_dim` and `heads` × `value_dim` of `dtype`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class _LayerView(CacheLayerMixin):
    """One layer in one forward: writes new keys and values, returns all the rows' keys and values.

    Args:
        writes: For keys, then values: `[S, H, D]` whole buffer and `[b * n]` positions in it to write; `[M]` if packed.
        reads: `[b, H, kv_length, D]` keys, then values, of the forward's rows; with `places` `[P, H, D]` of all rows.
            None for a layer that reads committed positions itself.
        places: `[b, kv_length]` positions of the rows in the buffers; None where `reads` has them in order.
    """

    def __init__(
        self, writes: list[tuple[Tensor, Tensor]], reads: list[Tensor] | None, kv_length: int, places: Tensor | None
    ) -> None:
        super().__init__()
        self._writes, self._reads, self._kv_length, self._places = writes, reads, kv_length, places

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[b, H, n, D]`, or packed `[1, H, M, D]`; return the rows' `[b, H, kv_length, D]`."""
        for (buffer, index), states in zip(self._writes, (key_states, value_states), strict=True):
            buffer.index_copy_(0, index, states.transpose(1, 2).flatten(0, 1))
        if self._reads is None:
            return key_states, value_states
        keys, values = self._reads if self._places is None else [_gather(one, self._places) for one in self._reads]
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._kv_length, 0  # unused, as masks are passed in whole

    def get_seq_length(self) -> int:
        return 0  # unused, as positions are passed in

    def get_max_length(self) -> int:
        return self._kv_length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return devices.lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """Return `[b, H, n, D]` of `[P, H, D]` at `places` `[b, n]`."""
    flat = states.index_select(0, places.flatten().to(states.device))
    rows: Tensor = flat.unflatten(0, places.shape)
    return rows.transpose(1, 2)


class KVCache:
    """Keys and values of `slots` rows of up to `length` positions.

    A tree's nodes are written behind the row's committed positions, in node order; `commit` then compacts the accepted
    ones. Layers of the same shape share one buffer `[members * slots * length, H, D]`, so that a commit is one gather
    and one scatter for all of them. The buffers are flat and written whole: compilers keep only such writes in place.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        length: Positions of a row, draft tokens included.
        device: Where positions come from; a model spread over several devices has buffers on each.
        positions: Of all slots together; by default each has `length` of its own.
    """

    in_order = True  # a slot's positions are contiguous

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        slots: int,
        length: int,
        device: torch.device,
        positions: int | None = None,
    ) -> None:
        self.slots, self.length, self.device = slots, length, device
        # Positions per contiguous block, and the block table `[slots, n]` on the host.
        self.block, self.blocks = length, torch.arange(slots)[:, None]
        self._starts = torch.arange(slots, device=device) * length
        self._positions = positions = slots * length if positions is None else positions
        members: dict[tuple[int, int, torch.dtype, torch.device], int] = {}
        # For each layer buffer and member of its keys and its values; empty for a layer that stores nothing.
        self._of_layers: list[list[tuple[int, int]]] = []
        for shape in shapes:
            both = []
            if shape is not None:
                for dim in (shape.key_dim, shape.value_dim):
                    kind = (shape.heads, dim, shape.dtype, shape.device)
                    members[kind] = members.get(kind, 0) + 1
                    both.append((list(members).index(kind), members[kind] - 1))
            self._of_layers.append(both)
        self.buffers = [
            _zeros((count * positions, heads, dim), dtype, place)
            for (heads, dim, dtype, place), count in members.items()
        ]
        # On a CPU few positions move, and numpy moves them in less time than a PyTorch call takes.
        self._on_host: list[npt.NDArray[np.uint8]] | None = None
        if all(one.device.type == "cpu" and not devices.is_asynchronous(one.device) for one in self.buffers):
            self._on_host = [
                buffer.flatten(1).view(torch.uint8).unflatten(0, (count, -1)).numpy()
                for buffer, count in zip(self.buffers, members.values(), strict=True)
            ]
        # `[members, 1]` of each buffer: offsets of its members.
        self._members = [torch.arange(count, device=device)[:, None] * positions for count in members.values()]

    @property
    def depth(self) -> int:
        """Number of layers, those that store nothing included."""
        return len(self._of_layers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values `[P, H, D]` of each layer; raise `ValueError` if one stores nothing."""
        pairs = []
        for places in self._of_layers:
            keys, values = (
                self.buffers[buffer].unflatten(0, (-1, self._positions))[member] for buffer, member in places
            )
            pairs.append((keys, values))
        return pairs

    def view(
        self, first: int, positions: Tensor, kv_length: int, written: Tensor | None = None, apart: Collection[int] = ()
    ) -> Cache:
        """Return the cache as the model sees it in one forward.

        Args:
            first: Slot of the forward's first row; the others follow it.
            positions: `[b, n]` positions of the new tokens within their slots.
            kv_length: Positions to read, from the start of each slot; no row may be longer.
            written: `[M]` indices into the flattened `[b * n]` of the tokens that come, if not all.
            apart: Layers that get back only the new tokens' keys and values; they read the others from `layers`.
        """
        rows = slice(first, first + positions.shape[0])
        index = self._places_to_write(rows, positions)
        index = index.flatten() if written is None else index.flatten().index_select(0, written)
        # One addition for all layers: one per layer would cost more than the copies themselves.
        writes = [
            (index + members).to(buffer.device).unbind(0)
            for buffer, members in zip(self.buffers, self._members, strict=True)
        ]
        reads, places = self._reads(rows, kv_length)
        layers: list[CacheLayerMixin] = []
        for number, both in enumerate(self._of_layers):
            written_to = [(self.buffers[buffer], writes[buffer][member]) for buffer, member in both]
            read = None if number in apart else [reads[buffer][member] for buffer, member in both]
            layers.append(_LayerView(written_to, read, kv_length, places))
        return Cache(layers=layers)

    def commit(self, lengths: Tensor, path: Tensor) -> None:
        """Compact the KV of the accepted paths in slots `0..B-1` behind `lengths` `[B]` committed positions.

        `path` `[B, K]` are node ids, rising along each path; entries past a path's end are 0.
        """
        if self._on_host is not None:
            nodes, starts = path.numpy(), lengths.numpy()
            rows, steps_to = (nodes > np.arange(nodes.shape[1])).nonzero()
            sources = self._places_on_host(rows, starts[rows] + nodes[rows, steps_to])
            targets = self._places_on_host(rows, starts[rows] + steps_to)
            for view in self._on_host:
                view[:, targets] = view[:, sources]
            return
        rows_moved, base = slice(0, path.shape[0]), lengths[:, None]
        source = self._places(rows_moved, base + path).flatten()
        target = self._places(rows_moved, base + torch.arange(path.shape[1], device=path.device)).flatten()
        self._copy(source, target)

    def by_slot(self) -> list[Tensor]:
        """Return views `[slots, length, members, H, D]` of the buffers. A cache in blocks has none."""
        return [buffer.unflatten(0, (-1, self.slots, self.length)).movedim(0, 2) for buffer in self.buffers]

    def copy(self, source: int, target: int, length: int) -> None:
        for rows in self.by_slot():
            rows[target, :length] = rows[source, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of slot `source` to slot `target`."""
        self.copy(source, target, length)

    def clear(self, slot: int) -> None:
        for rows in self.by_slot():
            rows[slot] = 0

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Zero the `nodes` draft positions behind `lengths` `[R]` of the slots `rows` where `which` `[R]` is true."""
        # The host does not know which: in the other rows a position is zeroed that never holds a token.
        places = self._places(rows, lengths[:, None] + torch.arange(nodes, device=lengths.device))
        index = torch.where(which[:, None], places, self._unused_places(rows)).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            buffer.unflatten(0, (len(members), -1)).index_fill_(1, index.to(buffer.device), 0)

    def reserve(self, slot: int, positions: int) -> bool:
        """Reserve `positions` for a slot; return False, and change nothing, if too little memory is left."""
        return True

    def has_room(self, positions: int, rows: int) -> bool:
        """Return whether a new row of `positions` fits and leaves room for the present `rows` to grow."""
        return True

    def release(self, slot: int) -> None:
        """Free the slot's memory."""

    def _places(self, rows: slice, positions: Tensor) -> Tensor:
        """Map `positions` `[R, n]` within slots `rows` to positions in the buffers, `[R, n]`."""
        return positions + self._starts[rows, None]

    def _places_to_write(self, rows: slice, positions: Tensor) -> Tensor:
        """Map positions that the slots may not have reserved."""
        return self._places(rows, positions)

    def _places_on_host(self, rows: Places, positions: Places) -> Places:
        return rows * self.length + positions

    def _unused_places(self, rows: slice) -> Tensor:
        """Return `[R, 1]` a position for each slot that never holds a token."""
        return self._starts[rows, None] + (self.length - 1)

    def _reads(self, rows: slice, kv_length: int) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
        """Return `reads`, by buffer and member, and `places` of `_LayerView`."""
        reads = []
        for buffer, members in zip(self.buffers, self._members, strict=True):
            heads, dim = buffer.shape[1:]
            row = self.length * heads * dim
            # Not slices: whether they take all of a dimension would make a compiler specialise.
            read = buffer.as_strided(
                (len(members), rows.stop - rows.start, heads, kv_length, dim),
                (self.slots * row, row, dim, heads * dim, 1),
                rows.start * row,
            )
            reads.append(read.unbind(0))
        return reads, None

    def _copy(self, source: Tensor, target: Tensor) -> None:
        for buffer, members in zip(self.buffers, self._members, strict=True):
            by_member = buffer.unflatten(0, (len(members), -1))
            moved = by_member.index_select(1, source.to(buffer.device))
            by_member.index_copy_(1, target.to(buffer.device), moved)


class PagedKVCache(KVCache):
    """A `KVCache` whose rows take memory as they grow, in blocks (PagedAttention, arXiv 2309.06180).

    Rows of different lengths then share a memory that would hold far fewer rows of the greatest length. The native
    executor finds the blocks itself; others read a copy of the rows, made layer by layer, which costs time.

    A slot must have `reserve`d a position before it is written. Writes elsewhere, as to the empty slots of a step, are
    lost, and zeros are read there.

    Args:
        blocks: Blocks of all rows together; at least as many as one row of `length` positions takes.
    """

    in_order = False

    def __init__(
        self, shapes: Sequence[LayerShape | None], slots: int, length: int, device: torch.device, blocks: int
    ) -> None:
        super().__init__(shapes, slots, length, device, positions=(blocks + SPARE) * BLOCK)
        self.block, self.blocks = BLOCK, torch.zeros(slots, blocks_of(length), dtype=torch.long)
        self._on_device = self.blocks.to(device)  # on a CPU the same memory
        self._offsets = torch.arange(length, device=device)[None]
        self._held = [0] * slots
        self._free = list(range(blocks + SPARE - 1, SPARE - 1, -1))

    def reserve(self, slot: int, positions: int) -> bool:
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
        return blocks_of(min(positions, self.length)) + rows <= len(self._free)

    def release(self, slot: int) -> None:
        held = self._held[slot]
        if held:
            self._free += self.blocks[slot, :held].tolist()[::-1]
            self.blocks[slot] = self._held[slot] = 0
            self._send([slot])

    def copy(self, source: int, target: int, length: int) -> None:
        source_row, target_row = slice(source, source + 1), slice(target, target + 1)
        positions = self._offsets[:, :length]
        self._copy(self._places(source_row, positions)[0], self._places(target_row, positions)[0])

    def move(self, source: int, target: int, length: int) -> None:
        # Two slots swap their blocks, and nothing is copied.
        both, other = [source, target], [target, source]
        self.blocks[both] = self.blocks[other]
        self._held[source], self._held[target] = self._held[target], self._held[source]
        self._send(both)

    def clear(self, slot: int) -> None:
        for buffer in self.buffers:
            in_blocks = buffer.unflatten(0, (-1, self._positions // BLOCK, BLOCK))
            in_blocks.index_fill_(1, devices.send(self.blocks[slot, : self._held[slot]].clone(), buffer.device), 0)

    def _send(self, slots: list[int]) -> None:
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
    return -(-positions // BLOCK)

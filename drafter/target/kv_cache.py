"""The target model's KV cache: fixed-size slots, one length per row, allocated once. See also `paged_kv_cache`.

All use of transformers' cache classes is in this module, because their signatures change between releases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices
from drafter.target.packing import Packing

Places = npt.NDArray[np.int64]


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


@dataclass(frozen=True)
class _Place:
    """Index of a layer's keys or values: a buffer, and a member of that buffer."""

    buffer: int
    member: int


class _LayerView(CacheLayerMixin):
    """One layer in one forward: writes new keys and values, returns all the rows' keys and values.

    Args:
        writes: For keys, then values: `[S, H, D]` whole buffer and `[b * n]` positions in it to write; `[M]` if packed.
        reads: `[b, H, kv_length, D]` keys, then values, of the forward's rows; with `places` `[P, H, D]` of all rows.
            None for a layer that reads committed positions itself and wants back only what it writes.
        kv_length: Positions to read.
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
        """Do nothing: the buffers exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (KV length, offset); unused, as masks are passed in whole."""
        return self._kv_length, 0

    def get_seq_length(self) -> int:
        """Return 0; unused, as positions are passed in."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of positions to read."""
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
    and one scatter for all of them. The buffers are flat and written as wholes because compilers keep only such writes
    in place.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        slots: Rows.
        length: Positions of a row, draft tokens included.
        device: Where positions come from; a model spread over several devices has buffers on each.
        positions: Of all slots together; by default each has `length` of its own.

    Attributes:
        in_order: A slot's positions are contiguous.
        block: Positions per contiguous block.
        blocks: `[slots, n]` int64 on the host: block table.
    """

    in_order = True

    def __init__(
        self,
        shapes: list[LayerShape | None],
        slots: int,
        length: int,
        device: torch.device,
        positions: int | None = None,
    ) -> None:
        self.slots, self.length, self.device = slots, length, device
        self.block, self.blocks = length, torch.arange(slots)[:, None]
        self._starts = torch.arange(slots, device=device) * length
        self._positions = positions = slots * length if positions is None else positions
        members: dict[tuple[int, int, torch.dtype, torch.device], int] = {}
        # For each layer the places of its keys and its values; empty for a layer that stores nothing.
        self._of_layers: list[list[_Place]] = []
        for shape in shapes:
            both = []
            if shape is not None:
                for dim in (shape.key_dim, shape.value_dim):
                    kind = (shape.heads, dim, shape.dtype, shape.device)
                    members[kind] = members.get(kind, 0) + 1
                    both.append(_Place(list(members).index(kind), members[kind] - 1))
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
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values `[P, H, D]` of each layer, over all positions.

        Raises:
            ValueError: A layer stores nothing.
        """
        pairs = []
        for places in self._of_layers:
            keys, values = (self.buffers[one.buffer].unflatten(0, (-1, self._positions))[one.member] for one in places)
            pairs.append((keys, values))
        return pairs

    def view(
        self,
        first: int,
        positions: Tensor,
        kv_length: int,
        packing: Packing | None = None,
        apart: Collection[int] = (),
    ) -> Cache:
        """Return the cache as the model sees it in one forward.

        Args:
            first: Slot of the forward's first row; the others follow it.
            positions: `[b, n]` positions of the new tokens within their slots.
            kv_length: Positions to read, from the start of each slot; no row may be longer.
            packing: Of the new tokens, if only some of them come.
            apart: Layers that get back only the new tokens' keys and values; they read the others from `layers`.
        """
        rows = slice(first, first + positions.shape[0])
        index = self._places_to_write(rows, positions)
        index = index.flatten() if packing is None else packing.pack(index)[0]
        # One addition for all layers: one per layer would cost more than the copies themselves.
        writes = [
            (index + members).to(buffer.device).unbind(0)
            for buffer, members in zip(self.buffers, self._members, strict=True)
        ]
        reads, places = self._reads(rows, kv_length)
        layers: list[CacheLayerMixin] = []
        for number, both in enumerate(self._of_layers):
            layers.append(
                _LayerView(
                    [(self.buffers[one.buffer], writes[one.buffer][one.member]) for one in both],
                    None if number in apart else [reads[one.buffer][one.member] for one in both],
                    kv_length,
                    places,
                )
            )
        return Cache(layers=layers)

    def commit(self, lengths: Tensor, path: Tensor) -> None:
        """Compact the KV of each row's accepted path behind its committed positions. Rows are slots `0..B-1`.

        Args:
            lengths: `[B]` committed positions before the step.
            path: `[B, K]` node ids, rising along each path; entries past a path's end are 0.
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

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for buffer in self.buffers:
            rows = buffer.unflatten(0, (-1, self.slots, self.length))
            rows[:, target, :length] = rows[:, source, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of slot `source` to slot `target`; `source` is given up."""
        self.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """Zero all positions of a slot."""
        for buffer in self.buffers:
            buffer.unflatten(0, (-1, self.slots, self.length))[:, slot] = 0

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Zero the draft positions of some rows without telling the host which.

        For the other rows a position is zeroed that never holds a token.

        Args:
            lengths: `[R]` committed positions of the rows.
            nodes: N, nodes of each row.
            which: `[R]` bool, rows to zero.
            rows: R slots.
        """
        places = self._places(rows, lengths[:, None] + torch.arange(nodes, device=lengths.device))
        index = torch.where(which[:, None], places, self._unused_places(rows)).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            buffer.unflatten(0, (len(members), -1)).index_fill_(1, index.to(buffer.device), 0)

    # Memory: every slot of this class has all of its own from the start.

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
        """Map positions to write, which the slots may not have reserved."""
        return self._places(rows, positions)

    def _places_on_host(self, rows: Places, positions: Places) -> Places:
        """Map `positions` `[n]` within slots `rows` `[n]` to positions in the buffers, `[n]`."""
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
        """Copy the states at `source` `[n]` to `target` `[n]`, in all layers."""
        for buffer, members in zip(self.buffers, self._members, strict=True):
            by_member = buffer.unflatten(0, (len(members), -1))
            moved = by_member.index_select(1, source.to(buffer.device))
            by_member.index_copy_(1, target.to(buffer.device), moved)

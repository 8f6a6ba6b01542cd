"""The base's KV cache: slots of fixed size, every row with a length of its own, allocated once. See `paged_kv_cache`.

What depends on transformers' cache classes is in this module alone, because their signatures move between releases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices, host_memory
from drafter.target.packing import Packing

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for a position: `heads` × `key_dim` and `heads` × `value_dim` numbers of `dtype`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    """Where a layer's keys and values are: which buffer, and which of the buffer's members."""

    buffer: int
    member: int


class _LayerView(CacheLayerMixin):
    """One layer in one forward: writes new keys and values, returns all the rows' keys and values.

    Args:
        writes: `[S, H, D]` whole buffers and `[b * n]` where in them the new keys, then the new values go; `[M]` if
            they come packed.
        reads: `[b, H, kv_length, D]` keys, then values, of the forward's rows; with `places` `[P, H, D]` of all rows.
            None for a layer that looks for what is committed elsewhere, and wants back what it writes.
        kv_length: Positions that are read.
        places: `[b, kv_length]` where the rows' positions are; None where `reads` has them in order.
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
        """Nothing to do: the buffers exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length, offset); unused, as masks are passed in whole."""
        return self._kv_length, 0

    def get_seq_length(self) -> int:
        """Unused, as positions are passed in; zero says so."""
        return 0

    def get_max_length(self) -> int:
        """Positions that are read."""
        return self._kv_length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return host_memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """Return `[b, H, n, D]` of `[P, H, D]` at `places` `[b, n]`."""
    flat = states.index_select(0, places.flatten().to(states.device))
    rows: Tensor = flat.unflatten(0, places.shape)
    return rows.transpose(1, 2)


class KVCache:
    """Keys and values of `slots` rows of up to `length` positions.

    A tree's nodes are written behind the row's committed positions, in node order; `commit` then moves the
    accepted ones together. Layers of the same shape share one buffer `[members * slots * length, H, D]`, so that
    a commit is one gather and one scatter for all of them. The buffers are flat and written as wholes because
    compilers keep only such writes in place.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        slots: Rows.
        length: Positions a row can hold, draft nodes included.
        device: Where positions come from; a base spread over several devices has buffers on each.
        positions: Of all slots together; by default each has `length` of its own.

    Attributes:
        in_order: Whether a slot's positions lie one after another.
        block: Positions that lie together.
        blocks: `[slots, n]` int64 on the host: where each slot's blocks are among all.
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
        # Of each layer: its keys' and its values'; none of a layer that stores nothing.
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
        # On a CPU the positions that move are few, and numpy takes less time to move them than PyTorch to be called.
        self._on_host: list[npt.NDArray[np.uint8]] | None = None
        if all(one.device.type == "cpu" and not devices.is_asynchronous(one.device) for one in self.buffers):
            self._on_host = [
                buffer.flatten(1).view(torch.uint8).unflatten(0, (count, -1)).numpy()
                for buffer, count in zip(self.buffers, members.values(), strict=True)
            ]
        # `[members, 1]` of each buffer: where its members begin.
        self._members = [torch.arange(count, device=device)[:, None] * positions for count in members.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[P, H, D]` of each layer, of all positions.

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
        """The cache as one forward sees it, to be given to the model.

        Args:
            first: Slot of the forward's first row; the others follow it.
            positions: `[b, n]` where in their slots the rows' new tokens go.
            kv_length: Positions to read, from the start of each slot; no row may be longer.
            packing: Of the new tokens, if only some of them come.
            apart: Layers that get back the new tokens' keys and values alone; they read the others from `layers`.
        """
        rows = slice(first, first + positions.shape[0])
        index = self._places_to_write(rows, positions)
        index = index.flatten() if packing is None else packing.pack(index)[0]
        # All layers' in a few calls: one by one they would cost more than the copies themselves.
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
        """Move the nodes of each row's accepted path to the row's tail. Rows are slots `0..B-1`.

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
        """Let slot `target` have the first `length` positions of slot `source`, which is given up."""
        self.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """Set all positions of a slot to zero."""
        for buffer in self.buffers:
            buffer.unflatten(0, (-1, self.slots, self.length))[:, slot] = 0

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Set the draft nodes of some rows to zero; the host need not know of which.

        The other rows have a position set to zero instead that never holds a token.

        Args:
            lengths: `[R]` committed positions of the rows.
            nodes: N, nodes of each row.
            which: `[R]` bool.
            rows: R slots.
        """
        places = self._places(rows, lengths[:, None] + torch.arange(nodes, device=lengths.device))
        index = torch.where(which[:, None], places, self._unused_places(rows)).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            buffer.unflatten(0, (len(members), -1)).index_fill_(1, index.to(buffer.device), 0)

    # ---- memory: every slot of this class has all of its own from the start

    def reserve(self, slot: int, positions: int) -> bool:
        """Let a slot hold so many positions; False, and nothing done, if too little memory is left."""
        return True

    def has_room(self, positions: int, rows: int) -> bool:
        """Whether a new row may hold so many positions, and some are left for the `rows` there are to grow."""
        return True

    def release(self, slot: int) -> None:
        """Give up what a slot holds."""

    # ---- where positions are

    def _places(self, rows: slice, positions: Tensor) -> Tensor:
        """Return where `positions` `[R, n]` of slots `rows` are among all, `[R, n]`."""
        return positions + self._starts[rows, None]

    def _places_to_write(self, rows: slice, positions: Tensor) -> Tensor:
        """Return the same where new states go, which the slots may not have reserved."""
        return self._places(rows, positions)

    def _places_on_host(self, rows: Places, positions: Places) -> Places:
        """Return where `positions` `[n]` of slots `rows` `[n]` are among all, `[n]`."""
        return rows * self.length + positions

    def _unused_places(self, rows: slice) -> Tensor:
        """Return `[R, 1]` a place for each slot that no token is ever read from."""
        return self._starts[rows, None] + (self.length - 1)

    def _reads(self, rows: slice, kv_length: int) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
        """Return what `_LayerView` reads, by buffer and member, and its `places`."""
        reads = []
        for buffer, members in zip(self.buffers, self._members, strict=True):
            heads, dim = buffer.shape[1:]
            row = self.length * heads * dim
            # Not slices: whether they take all of a dimension would be cases of their own to a compiler.
            read = buffer.as_strided(
                (len(members), rows.stop - rows.start, heads, kv_length, dim),
                (self.slots * row, row, dim, heads * dim, 1),
                rows.start * row,
            )
            reads.append(read.unbind(0))
        return reads, None

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the states at places `source` `[n]` to places `target` `[n]`, in all layers."""
        for buffer, members in zip(self.buffers, self._members, strict=True):
            by_member = buffer.unflatten(0, (len(members), -1))
            moved = by_member.index_select(1, source.to(buffer.device))
            by_member.index_copy_(1, target.to(buffer.device), moved)

"""The base's KV cache: slots of fixed size, every row with a length of its own, allocated once.

What depends on transformers' cache classes is in this module alone, because their signatures move between releases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices
from drafter.base.packing import Packing


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
        reads: `[b, H, kv_length, D]` keys, then values, of the forward's rows.
        kv_length: Positions that are read.
    """

    def __init__(self, writes: list[tuple[Tensor, Tensor]], reads: list[Tensor], kv_length: int) -> None:
        super().__init__()
        self._writes, self._reads, self._kv_length = writes, reads, kv_length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[b, H, n, D]`, or packed `[1, H, M, D]`; return the rows' `[b, H, kv_length, D]`."""
        for (buffer, index), states in zip(self._writes, (key_states, value_states), strict=True):
            buffer.index_copy_(0, index, states.transpose(1, 2).flatten(0, 1))
        keys, values = self._reads
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
    """

    def __init__(self, shapes: list[LayerShape | None], slots: int, length: int, device: torch.device) -> None:
        self.slots, self.length = slots, length
        members: dict[tuple[int, int, torch.dtype, torch.device], int] = {}
        # Of each layer: its keys' and its values'; none of a layer that stores nothing.
        self._places: list[list[_Place]] = []
        for shape in shapes:
            both = []
            if shape is not None:
                for dim in (shape.key_dim, shape.value_dim):
                    kind = (shape.heads, dim, shape.dtype, shape.device)
                    members[kind] = members.get(kind, 0) + 1
                    both.append(_Place(list(members).index(kind), members[kind] - 1))
            self._places.append(both)
        self.buffers = [
            torch.zeros(count * slots * length, heads, dim, dtype=dtype, device=place)
            for (heads, dim, dtype, place), count in members.items()
        ]
        self._starts = torch.arange(slots, device=device) * length
        # On a CPU the positions that move are few, and numpy takes less time to move them than PyTorch to be called.
        self._on_host: list[npt.NDArray[np.uint8]] | None = None
        if all(one.device.type == "cpu" and not devices.is_asynchronous(one.device) for one in self.buffers):
            self._on_host = [
                buffer.flatten(1).view(torch.uint8).unflatten(0, (count, -1)).numpy()
                for buffer, count in zip(self.buffers, members.values(), strict=True)
            ]
        # `[members, 1]` of each buffer: where its members begin.
        self._members = [torch.arange(count, device=device)[:, None] * (slots * length) for count in members.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[slots * length, H, D]` of each layer.

        Raises:
            ValueError: A layer stores nothing.
        """
        pairs = []
        for places in self._places:
            keys, values = (
                self.buffers[one.buffer].unflatten(0, (-1, self.slots * self.length))[one.member] for one in places
            )
            pairs.append((keys, values))
        return pairs

    def view(self, first: int, positions: Tensor, kv_length: int, packing: Packing | None = None) -> Cache:
        """The cache as one forward sees it, to be given to the model.

        Args:
            first: Slot of the forward's first row; the others follow it.
            positions: `[b, n]` where in their slots the rows' new tokens go.
            kv_length: Positions to read, from the start of each slot; no row may be longer.
            packing: Of the new tokens, if only some of them come.
        """
        rows = positions.shape[0]
        index = positions + self._starts[first : first + rows, None]
        index = index.flatten() if packing is None else packing.pack(index)[0]
        # All layers' in a few calls: one by one they would cost more than the copies themselves.
        writes, reads = [], []
        for buffer, members in zip(self.buffers, self._members, strict=True):
            writes.append((index + members).to(buffer.device).unbind(0))
            heads, dim = buffer.shape[1:]
            row = self.length * heads * dim
            # Not slices: whether they take all of a dimension would be cases of their own to a compiler.
            read = buffer.as_strided(
                (len(members), rows, heads, kv_length, dim), (self.slots * row, row, dim, heads * dim, 1), first * row
            )
            reads.append(read.unbind(0))
        layers: list[CacheLayerMixin] = []
        for places in self._places:
            layers.append(
                _LayerView(
                    [(self.buffers[one.buffer], writes[one.buffer][one.member]) for one in places],
                    [reads[one.buffer][one.member] for one in places],
                    kv_length,
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
            starts = (self._starts[: path.shape[0]] + lengths).numpy()
            nodes = path.numpy()
            rows, steps_to = (nodes > np.arange(nodes.shape[1])).nonzero()
            sources, targets = starts[rows] + nodes[rows, steps_to], starts[rows] + steps_to
            for view in self._on_host:
                view[:, targets] = view[:, sources]
            return
        steps = torch.arange(path.shape[1], device=path.device)
        base = self._starts[: path.shape[0]] + lengths
        source, target = (base[:, None] + path).flatten(), (base[:, None] + steps).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            by_member = buffer.unflatten(0, (len(members), -1))
            moved = by_member.index_select(1, source.to(buffer.device))
            by_member.index_copy_(1, target.to(buffer.device), moved)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for buffer in self.buffers:
            rows = buffer.unflatten(0, (-1, self.slots, self.length))
            rows[:, target, :length] = rows[:, source, :length]

    def clear(self, slot: int) -> None:
        """Set all positions of a slot to zero."""
        for buffer in self.buffers:
            buffer.unflatten(0, (-1, self.slots, self.length))[:, slot] = 0

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """Set the draft nodes of some rows to zero; the host need not know of which.

        The other rows have their last position set to zero instead, which never holds a token.

        Args:
            lengths: `[R]` committed positions of the rows.
            nodes: N, nodes of each row.
            which: `[R]` bool.
            rows: R slots.
        """
        starts = self._starts[rows, None]
        places = starts + lengths[:, None] + torch.arange(nodes, device=lengths.device)
        index = torch.where(which[:, None], places, starts + self.length - 1).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            buffer.unflatten(0, (len(members), -1)).index_fill_(1, index.to(buffer.device), 0)

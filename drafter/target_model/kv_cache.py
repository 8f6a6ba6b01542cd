"""Keys and values of the target model's attention layers. All use of transformers' cache classes is here and in
`cache.py`, because their signatures change between releases."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from drafter import devices
from drafter.target_model.cache import BLOCK, Blocks, CacheBytes, GrowingBlocks, LayerCache, LayerView, Rows
from drafter.target_model.nodes import Nodes


def cache_name(model: nn.Module) -> str:
    """Return the name by which a model takes a cache, and by which its output has it.

    transformers 5.24 renamed it; models with code of their own may keep the old name, and Mamba has one of its own.
    """
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in taken), "past_key_values")


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


class _LayerView(LayerView):
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
        super().__init__(kv_length)
        self._writes, self._reads, self._places = writes, reads, places

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


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """Return `[b, H, n, D]` of `[P, H, D]` at `places` `[b, n]`."""
    flat = states.index_select(0, places.flatten().to(states.device))
    rows: Tensor = flat.unflatten(0, places.shape)
    return rows.transpose(1, 2)


class KVCache(LayerCache):
    """Keys and values by position.

    A tree's nodes are written behind the row's committed positions, in node order; `commit` then compacts the accepted
    ones. Layers of the same shape share one buffer `[members * places, H, D]`, so that a commit is one gather and one
    scatter for all of them. The buffers are flat and written whole: compilers keep only such writes in place.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        blocks: The places. Its device is where positions come from; a model spread over several devices has buffers on
            each.
    """

    def __init__(self, shapes: Sequence[LayerShape | None], blocks: Blocks) -> None:
        self.blocks, places, device = blocks, blocks.places, blocks.device
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
            devices.zeros((count * places, heads, dim), dtype, at) for (heads, dim, dtype, at), count in members.items()
        ]
        # On a CPU few positions move, and numpy moves them in less time than a PyTorch call takes.
        self._on_host: list[npt.NDArray[np.uint8]] | None = None
        if all(one.device.type == "cpu" and not devices.is_asynchronous(one.device) for one in self.buffers):
            self._on_host = [
                buffer.flatten(1).view(torch.uint8).unflatten(0, (count, -1)).numpy()
                for buffer, count in zip(self.buffers, members.values(), strict=True)
            ]
        # `[members, 1]` of each buffer: offsets of its members.
        self._members = [torch.arange(count, device=device)[:, None] * places for count in members.values()]
        self._offsets = torch.arange(blocks.length, device=device)[None]
        self._rows: Rows | None = None
        if blocks.in_order:
            shape_of_rows = (-1, blocks.slots, blocks.length)
            self._rows = Rows([buffer.unflatten(0, shape_of_rows).movedim(0, 2) for buffer in self.buffers])

    @property
    def bytes(self) -> CacheBytes:
        return CacheBytes(position=sum(buffer[:: self.blocks.places].nbytes for buffer in self.buffers))

    def first(self, count: int) -> KVCache:
        """Return a view of the first layers: what is written through it is written here."""
        view = copy(self)
        view._of_layers = self._of_layers[:count]
        return view

    def keys_values(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values `[places, H, D]` of each layer; empty tensors of one that stores nothing."""
        pairs, nothing = [], torch.empty(0)
        for places in self._of_layers:
            keys, values = (
                (self.buffers[buffer].unflatten(0, (-1, self.blocks.places))[member] for buffer, member in places)
                if places
                else (nothing, nothing)
            )
            pairs.append((keys, values))
        return pairs

    def views(self, nodes: Nodes, apart: Collection[int]) -> Mapping[int, LayerView]:
        """See `LayerCache.views`. Layers that are `apart` read the other positions from `keys_values`."""
        count, size = nodes.tokens.shape
        rows = slice(nodes.slot, nodes.slot + count)
        positions = nodes.lengths[:, None] + torch.arange(size, device=nodes.tokens.device)
        index = self.blocks.to_write(rows, positions).flatten()
        if nodes.packing is not None:
            index = index.index_select(0, nodes.packing.nodes)
        # One addition for all layers: one per layer would cost more than the copies themselves.
        writes = [
            (index + members).to(buffer.device).unbind(0)
            for buffer, members in zip(self.buffers, self._members, strict=True)
        ]
        reads, places = self._reads(rows, nodes.kv_length)
        views: dict[int, LayerView] = {}
        for number, both in enumerate(self._of_layers):
            written_to = [(self.buffers[buffer], writes[buffer][member]) for buffer, member in both]
            read = None if number in apart else [reads[buffer][member] for buffer, member in both]
            views[number] = _LayerView(written_to, read, nodes.kv_length, places)
        return views

    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        if path.shape[1] == 1:
            return
        if self._on_host is not None:
            nodes, starts = path.numpy(), lengths.numpy()
            moved, steps_to = (nodes > np.arange(nodes.shape[1])).nonzero()
            sources = self.blocks.on_host(rows.start + moved, starts[moved] + nodes[moved, steps_to])
            targets = self.blocks.on_host(rows.start + moved, starts[moved] + steps_to)
            for view in self._on_host:
                view[:, targets] = view[:, sources]
            return
        base = lengths[:, None]
        source = self.blocks.of(rows, base + path).flatten()
        target = self.blocks.of(rows, base + self._offsets[:, : path.shape[1]]).flatten()
        self._copy(source, target)

    def shareable(self, source: int, length: int) -> int:
        return length

    def copy(self, source: int, target: int, length: int) -> None:
        if self._rows is not None:
            self._rows.copy(source, target, length)
            return
        places = [self.blocks.of(slice(slot, slot + 1), self._offsets[:, :length])[0] for slot in (source, target)]
        self._copy(*places)

    def move(self, source: int, target: int, length: int) -> None:
        if self._rows is not None:  # otherwise the slots swap their blocks, and nothing is copied
            self._rows.copy(source, target, length)

    def clear(self, slot: int, length: int | None = None) -> None:
        if self._rows is not None:
            self._rows.clear(slot, length)
            return
        assert isinstance(self.blocks, GrowingBlocks)
        held = self.blocks.table[slot, : self.blocks.held[slot]].clone()
        for buffer in self.buffers:
            in_blocks = buffer.unflatten(0, (-1, self.blocks.places // BLOCK, BLOCK))
            in_blocks.index_fill_(1, devices.send(held, buffer.device), 0)

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        # The host does not know which: in the other rows a position is zeroed that never holds a token.
        places = self.blocks.of(rows, lengths[:, None] + self._offsets[:, :nodes])
        index = torch.where(which[:, None], places, self.blocks.unused(rows)).flatten()
        for buffer, members in zip(self.buffers, self._members, strict=True):
            buffer.unflatten(0, (len(members), -1)).index_fill_(1, index.to(buffer.device), 0)

    def zero(self) -> None:
        for buffer in self.buffers:
            devices.zero_untouched(buffer)

    def _reads(self, rows: slice, kv_length: int) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
        """Return `reads`, by buffer and member, and `places` of `_LayerView`."""
        blocks = self.blocks
        if not blocks.in_order:
            whole = [buffer.unflatten(0, (-1, blocks.places)).unbind(0) for buffer in self.buffers]
            return whole, blocks.of(rows, self._offsets[:, :kv_length].expand(rows.stop - rows.start, -1))
        reads = []
        for buffer, members in zip(self.buffers, self._members, strict=True):
            heads, dim = buffer.shape[1:]
            row = blocks.length * heads * dim
            # Not slices: whether they take all of a dimension would make a compiler specialise.
            read = buffer.as_strided(
                (len(members), rows.stop - rows.start, heads, kv_length, dim),
                (blocks.slots * row, row, dim, heads * dim, 1),
                rows.start * row,
            )
            reads.append(read.unbind(0))
        return reads, None

    def _copy(self, source: Tensor, target: Tensor) -> None:
        for buffer, members in zip(self.buffers, self._members, strict=True):
            by_member = buffer.unflatten(0, (len(members), -1))
            moved = by_member.index_select(1, source.to(buffer.device))
            by_member.index_copy_(1, target.to(buffer.device), moved)

"""The base's KV cache: slots of fixed size, every row with a length of its own, allocated once.

What depends on transformers' cache classes is in this module alone, because their signatures move between releases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


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


class _SlotLayer(CacheLayerMixin):
    """One layer's view of the cache: writes new keys and values, returns all the rows' keys and values."""

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[b, H, n, D]`; return those of the rows in use `[b, H, kv_length, D]`."""
        return self._cache._write(self._index, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length, offset); unused, as masks are passed in whole."""
        return self._cache._kv_length, 0

    def get_seq_length(self) -> int:
        """Unused, as positions are passed in; zero says so."""
        return 0

    def get_max_length(self) -> int:
        """Positions a slot holds."""
        return self._cache.length


class KVCache(Cache):
    """Keys and values of `slots` rows of up to `length` positions.

    A tree's nodes are written behind the row's committed positions, in node order; `commit` then moves the
    accepted ones together. Layers of the same shape share one buffer `[layers, slots * length, H, D]`, so that
    a commit is one gather and one scatter for all of them.

    Args:
        shapes: Shape of each layer; None for a layer that stores nothing.
        slots: Rows.
        length: Positions a row can hold, draft nodes included.
        device: Where positions come from; a base spread over several devices has buffers on each.
    """

    def __init__(self, shapes: list[LayerShape | None], slots: int, length: int, device: torch.device) -> None:
        super().__init__(layers=[_SlotLayer(self, index) for index in range(len(shapes))])
        self.slots, self.length = slots, length
        members: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for layer, shape in enumerate(shapes):
            if shape is not None:
                for part, dim in enumerate((shape.key_dim, shape.value_dim)):
                    members.setdefault((shape.heads, dim, shape.dtype, shape.device), []).append((layer, part))
        self._owners = list(members.values())
        self._buffers: list[Tensor] = []
        # Where a layer writes: `[slots * length, H, D]`, keys and values.
        self._writable: dict[tuple[int, int], Tensor] = {}
        for (heads, dim, dtype, place), owners in members.items():
            buffer = torch.zeros(len(owners), slots * length, heads, dim, dtype=dtype, device=place)
            self._buffers.append(buffer)
            self._writable.update(zip(owners, buffer.unbind(0), strict=True))
        self._starts = torch.arange(slots, device=device) * length
        # Set by `prepare` for one forward: where each device writes, and what each layer reads, `[b, H, kv_length, D]`.
        self._index: dict[torch.device, Tensor] = {}
        self._readable: dict[tuple[int, int], Tensor] = {}
        self._kv_length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def prepare(self, first: int, positions: Tensor, kv_length: int) -> None:
        """Say where the next forward writes and what it reads.

        Args:
            first: Slot of the forward's first row; the others follow it.
            positions: `[b, n]` where in their slots the rows' new tokens go.
            kv_length: Positions to read, from the start of each slot; no row may be longer.
        """
        rows = positions.shape[0]
        index = (positions + self._starts[first : first + rows, None]).flatten()
        self._index = {buffer.device: index.to(buffer.device) for buffer in self._buffers}
        # All layers' views in a few calls: one by one they would cost more than the copies themselves.
        for buffer, owners in zip(self._buffers, self._owners, strict=True):
            by_slot = buffer.unflatten(1, (self.slots, self.length))[:, first : first + rows, :kv_length]
            self._readable.update(zip(owners, by_slot.transpose(2, 3).unbind(0), strict=True))
        self._kv_length = kv_length

    def _write(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        for part, states in enumerate((key_states, value_states)):
            target = self._writable[layer, part]
            target.index_copy_(0, self._index[target.device], states.transpose(1, 2).flatten(0, 1))
        return self._readable[layer, 0], self._readable[layer, 1]

    def commit(self, lengths: Tensor, path: Tensor) -> None:
        """Move the nodes of each row's accepted path to the row's tail. Rows are slots `0..B-1`.

        Args:
            lengths: `[B]` committed positions before the step.
            path: `[B, K]` node ids, rising along each path; entries past a path's end may be anything valid.
        """
        steps = torch.arange(path.shape[1], device=path.device)
        base = self._starts[: path.shape[0]] + lengths
        source, target = (base[:, None] + path).flatten(), (base[:, None] + steps).flatten()
        for buffer in self._buffers:
            moved = buffer.index_select(1, source.to(buffer.device))
            buffer.index_copy_(1, target.to(buffer.device), moved)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for buffer in self._buffers:
            rows = buffer.unflatten(1, (self.slots, self.length))
            rows[:, target, :length] = rows[:, source, :length]

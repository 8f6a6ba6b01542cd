"""States of the target model's recurrent layers: linear attention, state spaces and short convolutions.

Such a layer keeps no entry for each position but one state for the whole text, which each token changes. Nothing undoes
a change, so every node of a draft tree has a state of its own until the step commits one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter import devices
from drafter.target_model.cache import CacheBytes, LayerCache
from drafter.target_model.nodes import Nodes, PromptNodes, TreeNodes
from drafter.target_model.tree_scan import TreePaths

Key = tuple[str, int]
"""Name of a state in its layer: `conv` for a convolution's last inputs or `recurrent`, and a number."""
States = dict[Key, Tensor]
"""States of one layer, `[R, ...]` for R texts or nodes."""
Chosen = Callable[[Tensor, Tensor], Tensor]
"""Returns a state `[R, ...]` after one node of each of R rows of a forward, given rows and nodes `[R]`."""


@dataclass(frozen=True)
class StateShape:
    """One state of one text."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


LayerStates = Mapping[int, Mapping[Key, StateShape]]
"""Shapes of the states of each layer that has some, by the layer's number."""


_SNAPSHOT = 2  # the place of a slot's third state, that at its prompt's end


class StateCache(LayerCache):
    """Three states for each slot and layer, and the lengths of the texts to which they belong.

    What a step commits goes to one of the first two, that which does not belong to the present length, so a step that
    fails loses nothing. The third is that at the end of the prompt, for others that begin with the same text.

    Args:
        shapes: Of each layer that has states.
        number: Number of the view that mixers find it by: behind those of the model's layers.
        node_bytes: What mixers keep of a node until the commit.
    """

    def __init__(self, shapes: LayerStates, slots: int, device: torch.device, number: int, node_bytes: int) -> None:
        self.slots, self._number, self._node_bytes = slots, number, node_bytes
        # `[3 S + 1, ...]`: the states of all slots, and zeros, the state of an empty text.
        self.buffers: dict[int, States] = {
            layer: {
                key: devices.zeros((3 * slots + 1, *shape.sizes), shape.dtype, shape.device)
                for key, shape in of_layer.items()
            }
            for layer, of_layer in shapes.items()
        }
        self.at = torch.full((2, slots), -1, device=device)  # tokens of the text whose state this is; -1 for none
        self.snapshots = [0] * slots  # tokens of each slot's third state, on the host; 0 for none
        self._slot = torch.arange(slots, device=device)
        self.nodes: dict[int, dict[Key, Chosen]] = {}  # states after the nodes of the last forward, by layer

    @property
    def bytes(self) -> CacheBytes:
        return CacheBytes(slot=3 * sum(buffer[0].nbytes for buffer in self._tensors()), node=self._node_bytes)

    def views(self, nodes: Nodes, apart: Collection[int]) -> Mapping[int, CacheLayerMixin]:
        rows = slice(nodes.slot, nodes.slot + len(nodes.tokens))
        at, slot = self.at[:, rows], self._slot[rows]
        later = torch.where(at[1] == nodes.lengths, slot + self.slots, 3 * self.slots)
        view = StateView(self, nodes, torch.where(at[0] == nodes.lengths, slot, later))
        if isinstance(nodes, PromptNodes):
            ends = devices.send(torch.tensor([span.stop for span in nodes.spans]), at.device)
            at[1], at[0] = ends, ends - 1 if nodes.keep else -1
            for slot_of_text, span in enumerate(nodes.spans, nodes.slot):
                self.snapshots[slot_of_text] = span.stop - 1 if nodes.keep else span.stop
        self.nodes = {}
        return {self._number: view}

    def put(self, slot: int, layer: int, before: States | None, after: States) -> None:
        """Write the states `[1, ...]` of a slot's text that has been read, and of that without its last token.

        Args:
            before: None if all tokens are committed. If not, the last one may be the first that is not a prompt's.
        """
        places = ((1, after), (_SNAPSHOT, after)) if before is None else ((0, before), (1, after), (_SNAPSHOT, before))
        for place, states in places:
            for key, state in states.items():
                self.buffers[layer][key][place * self.slots + slot] = state[0]

    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        at, slot = self.at[:, rows], self._slot[rows]
        spare = (at[0] == lengths).long()
        at.copy_(torch.where(at == lengths, at, -1))
        target, row, last = spare * self.slots + slot, slot - rows.start, path.amax(1)
        for layer, states in self.nodes.items():
            for key, after in states.items():
                buffer = self.buffers[layer][key]
                there = buffer.device
                buffer.index_copy_(0, target.to(there), after(row.to(there), last.to(there)).to(buffer.dtype))
        at.scatter_(0, spare[None], (lengths + 1 + (path > 0).sum(1))[None])

    def shareable(self, source: int, length: int) -> int:
        known = self.snapshots[source]
        return known if known <= length else 0

    def copy(self, source: int, target: int, length: int) -> None:
        for buffer in self._in_slots():
            buffer[1:, target] = buffer[_SNAPSHOT, source]
        self.at[0, target], self.at[1, target] = -1, length
        self.snapshots[target] = length

    def move(self, source: int, target: int, length: int) -> None:
        for buffer in self._in_slots():
            buffer[:, target] = buffer[:, source]
        self.at[:, target] = self.at[:, source]
        self.snapshots[target] = self.snapshots[source]

    def clear(self, slot: int, length: int | None = None) -> None:
        for buffer in self._in_slots():
            buffer[:, slot] = 0
        self.at[:, slot], self.snapshots[slot] = -1, 0

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        # The present length names the state from before the step.
        at = self.at[:, rows]
        gone = which & (at != lengths)
        at.masked_fill_(gone, -1)
        for buffer in self._in_slots():
            gone_there = gone.to(buffer.device).view(*gone.shape, *[1] * (buffer.dim() - 2))
            buffer[:_SNAPSHOT, rows].masked_fill_(gone_there, 0)

    def zero(self) -> None:
        for buffer in self._tensors():
            devices.zero_untouched(buffer)
        self.at.fill_(-1)
        self.snapshots = [0] * self.slots

    def _tensors(self) -> Iterator[Tensor]:
        for states in self.buffers.values():
            yield from states.values()

    def _in_slots(self) -> Iterator[Tensor]:
        """Yield `[3, S, ...]` of each buffer."""
        for buffer in self._tensors():
            yield buffer[:-1].unflatten(0, (_SNAPSHOT + 1, self.slots))


class StateView(CacheLayerMixin):
    """The states in one forward. Mixers find it in the cache that the model hands to them; see `view_in`.

    Args:
        index: `[B]` entry of the buffers that has the state of each row's committed text.
    """

    def __init__(self, cache: StateCache, nodes: Nodes, index: Tensor) -> None:
        super().__init__()
        self.cache, self.nodes, self._index = cache, nodes, index

    def committed(self, layer: int, rows: slice = slice(None)) -> States:
        """Return copies `[R, ...]` of the states of the rows' committed texts."""
        index = self._index[rows]
        return {
            key: buffer.index_select(0, index.to(buffer.device)) for key, buffer in self.cache.buffers[layer].items()
        }

    @cached_property
    def paths(self) -> TreePaths:
        nodes = self.nodes
        assert isinstance(nodes, TreeNodes)
        return TreePaths(nodes.parents, nodes.ancestors)

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise TypeError("states are read and written by their mixers, not by attention")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return 0


def view_in(cache: object) -> StateView | None:
    """Return the view of states in a cache of `TargetCache.view`, or None for another cache."""
    last = cache.layers[-1] if isinstance(cache, Cache) and cache.layers else None
    return last if isinstance(last, StateView) else None

"""States of the target model's recurrent layers: linear attention, state spaces and short convolutions.

Such a layer keeps no entry for each position but one state for the whole text, which each token changes. Nothing undoes
a change, so every node of a draft tree has a state of its own until the step commits one of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from drafter import devices
from drafter.native.mixing import MixerLayer, Texts, keep_paths
from drafter.target_model.cache import CacheBytes, LayerCache, LayerView
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


_BORDER = 256  # tokens of a prompt between two snapshots
_TEXT = 2  # states of a slot's text; the snapshots lie behind those of all slots


@dataclass(eq=False)
class Snapshot:
    """A state that texts which begin alike may go on from. `place` is -1 until it has one."""

    place: int
    length: int  # tokens of the text whose state this is
    slots: set[int]  # whose texts begin with these tokens
    salt: str = ""  # whose text it is
    copied: bool = False  # a text has gone on from it


def least_worth(known: Sequence[Snapshot]) -> Snapshot:
    """Return which of these to give up; that which was used last comes last, and the new one is the last of all.

    It is one of the salt with the most, of the new one's where several have as many. Those that have been copied stay,
    up to half of their salt's: then that of them goes which was used longest ago. Of the others, a text keeps its first
    and its last, and those between thin out towards a constant proportion from each to the next, since most texts that
    begin alike differ early. Where there are none between, the one goes that was used longest ago.
    """
    held = Counter(one.salt for one in known)
    greediest = [one.salt for one in known if held[one.salt] == max(held.values())]
    salt = known[-1].salt if known[-1].salt in greediest else greediest[0]
    own = [one for one in known if one.salt == salt]
    copied = [one for one in own if one.copied]
    if 2 * len(copied) > len(own):
        return copied[0]
    lengths = defaultdict[int, list[int]](list)  # of each text's snapshots
    for one in own:
        for slot in one.slots:
            lengths[slot].append(one.length)

    def proportion(one: Snapshot) -> float:
        beside = [length for slot in one.slots for length in lengths[slot]]
        shorter = max((length for length in beside if length < one.length), default=0)
        longer = min((length for length in beside if length > one.length), default=math.inf)
        return longer / shorter if shorter else math.inf

    return min((one for one in own if not one.copied), key=proportion)


class Snapshots:
    """States at the ends of prompts, and on the way there, which other texts that begin alike go on from.

    This is the list of them, on the host. There are as many places as slots, those of kept rows included. A text that
    copies a snapshot shares its place with the text that it came from; where all are taken, `least_worth` goes.
    """

    def __init__(self, places: int) -> None:
        self._free = list(range(places))
        self._known: list[Snapshot] = []  # that which was used last comes last
        self._salts: dict[int, str] = {}  # whose text is in each slot

    def enter(self, slot: int, salt: str) -> None:
        self._salts[slot] = salt

    def add(self, slot: int, length: int) -> None:
        new = Snapshot(-1, length, {slot}, self._salts.get(slot, ""))
        self._known.append(new)
        if self._free:
            new.place = self._free.pop()
        else:
            gone = least_worth(self._known)
            self._known.remove(gone)
            new.place = gone.place

    def place(self, slot: int, length: int) -> int | None:
        """Return the place of a text's snapshot at `length` tokens; None if there is none, or none any more."""
        return next((one.place for one in self._known if one.length == length and slot in one.slots), None)

    def longest(self, slot: int, length: int) -> int:
        """Return the tokens of a text's longest snapshot of at most `length` tokens; 0 for none."""
        return max((one.length for one in self._known if one.length <= length and slot in one.slots), default=0)

    def share(self, source: int, target: int, length: int) -> None:
        """Make the snapshots of one text, of at most `length` tokens, those of another that goes on from there, too."""
        shared = [one for one in self._known if one.length <= length and source in one.slots]
        self._known = [one for one in self._known if one not in shared] + shared
        for one in shared:
            one.slots.add(target)
            one.copied |= one.length == length

    def move(self, source: int, target: int) -> None:
        self._salts[target] = self._salts.get(source, "")
        for one in self._known:
            if source in one.slots:
                one.slots.remove(source)
                one.slots.add(target)

    def release(self, slot: int, from_length: int = 0) -> list[int]:
        """Take a text's snapshots of `from_length` or more tokens away from it; return the places that are free now."""
        for one in self._known:
            if one.length >= from_length:
                one.slots.discard(slot)
        freed = [one.place for one in self._known if not one.slots]
        self._known = [one for one in self._known if one.slots]
        self._free += freed
        return freed


class StateCache(LayerCache):
    """Two states for each slot and layer, the lengths of the texts to which they belong, and as many `Snapshots`.

    What a step commits goes to the state that does not belong to the present length, so a step that fails loses
    nothing.

    Args:
        shapes: Of each layer that has states.
        number: Number of the view that mixers find it by: behind those of the model's layers.
        mixing: What mixers keep of the nodes and the rows of a step until its commit.
        reads_on: Prompts may be read in pieces, so that there are snapshots on the way; if not, at the end alone.
        transposed: Layers whose recurrent states `[..., V, K]` lie in memory as `[..., K, V]`.
    """

    def __init__(
        self,
        shapes: LayerStates,
        slots: int,
        device: torch.device,
        number: int,
        mixing: CacheBytes,
        reads_on: bool,
        transposed: Collection[int] = (),
    ) -> None:
        self.slots, self._number, self._mixing, self._reads_on = slots, number, mixing, reads_on
        # `[3 S + 1, ...]`: two states of all slots, snapshots, and zeros, the state of an empty text.
        self.buffers: dict[int, States] = {
            layer: {
                key: _zeros(3 * slots + 1, shape, transposed=layer in transposed and key[0] == "recurrent")
                for key, shape in of_layer.items()
            }
            for layer, of_layer in shapes.items()
        }
        self.at = torch.full((2, slots), -1, device=device)  # tokens of the text whose state this is; -1 for none
        self.snapshots = Snapshots(slots)
        self._slot = torch.arange(slots, device=device)
        # Of the last forward's nodes: the states after them, by layer, or what the native library makes them of.
        self.nodes: dict[int, dict[Key, Chosen]] = {}
        self.kept: list[tuple[MixerLayer, Tensor]] = []
        self.texts: Texts | None = None  # the nodes, as the native library runs them

    @property
    def bytes(self) -> CacheBytes:
        of_text = sum(buffer[0].nbytes for buffer in self._tensors())
        return CacheBytes(slot=3 * of_text, once=of_text) + self._mixing

    def enter(self, slot: int, salt: str) -> None:
        self.snapshots.enter(slot, salt)

    def views(self, nodes: Nodes, apart: Collection[int]) -> Mapping[int, LayerView]:
        return {self._number: self.view(nodes)}

    def view(self, nodes: Nodes) -> StateView:
        """Return the states in one forward."""
        rows = slice(nodes.slot, nodes.slot + len(nodes.tokens))
        at, slot = self.at[:, rows], self._slot[rows]
        later = torch.where(at[1] == nodes.lengths, slot + self.slots, 3 * self.slots)
        view = StateView(self, nodes, torch.where(at[0] == nodes.lengths, slot, later))
        if isinstance(nodes, PromptNodes):
            ends = devices.send(torch.tensor([span.stop for span in nodes.spans]), at.device)
            at[1], at[0] = ends, ends - 1 if nodes.keep else -1
            for slot_of_text, span in enumerate(nodes.spans, nodes.slot):
                stops = self.stops(span, nodes.keep)
                # That of where the last forward ended stays at a border, or if the prompt ended there. Longer ones are
                # of a forward that has failed.
                stays = span.start > 0 and (not span.start % _BORDER or span.start in stops)
                self.snapshots.release(slot_of_text, span.start + stays)
                for length in stops:
                    if length and self.snapshots.place(slot_of_text, length) is None:
                        self.snapshots.add(slot_of_text, length)
        self.nodes, self.kept, self.texts = {}, [], None
        return view

    def stops(self, span: range, keep: int) -> list[int]:
        """Return the lengths at which a text has a snapshot once these positions of it have been read.

        The last one may be `span.start`: of a text whose logits are wanted, the last token may be no prompt's.
        """
        end = span.stop - 1 if keep else span.stop
        first = (span.start // _BORDER + 1) * _BORDER
        return [*(range(first, end, _BORDER) if self._reads_on else ()), end]

    def writes(self, nodes: PromptNodes) -> Tensor:
        """Return `[W, 3]` int64 where a prompt's states go: a row, after how many of its tokens, and the entry."""
        found = []
        for row, span in enumerate(nodes.spans):
            slot = nodes.slot + row
            places = [(stop, self.snapshots.place(slot, stop)) for stop in self.stops(span, nodes.keep)]
            found += [
                (row, stop - span.start, _TEXT * self.slots + place) for stop, place in places if place is not None
            ]
            if nodes.keep:
                found.append((row, len(span) - 1, slot))
            found.append((row, len(span), self.slots + slot))
        return torch.tensor(found)

    def put(self, slot: int, layer: int, before: States | None, after: States) -> None:
        """Write the states `[1, ...]` of a slot's text that has been read, and of that without its last token.

        Args:
            before: None if all tokens are committed. If not, the last one may be the first that is not a prompt's.
        """
        for place, states in ((1, after),) if before is None else ((0, before), (1, after)):
            self._write(place * self.slots + slot, layer, states)

    def put_snapshot(self, slot: int, layer: int, length: int, states: States) -> None:
        """Write the states `[1, ...]` at one of `stops`."""
        place = self.snapshots.place(slot, length)
        if place is not None:  # others may have taken it in the same forward
            self._write(_TEXT * self.slots + place, layer, states)

    def _write(self, index: int, layer: int, states: States) -> None:
        for key, state in states.items():
            self.buffers[layer][key][index] = state[0]

    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        at, slot = self.at[:, rows], self._slot[rows]
        # A step of more rows than are decoded runs over slots whose prompt is being read, and of rows that are parked.
        # Their length is then that of no state: the newer state stays, and what the step makes takes the other's place.
        known = (at == lengths).any(0) | (lengths == 0)
        spare = (at[0] == lengths).long()
        spare = torch.where(known, spare, at.argmin(0))
        at.copy_(torch.where((at == lengths) | ~known, at, -1))
        target, row, last = spare * self.slots + slot, slot - rows.start, path.amax(1)
        for layer, states in self.nodes.items():
            for key, after in states.items():
                buffer = self.buffers[layer][key]
                there = buffer.device
                buffer.index_copy_(0, target.to(there), after(row.to(there), last.to(there)).to(buffer.dtype))
        if self.texts is not None and self.kept:
            keep_paths(self.kept, self.texts, path, target)
        at.scatter_(0, spare[None], torch.where(known, lengths + 1 + (path > 0).sum(1), -1)[None])

    def shareable(self, source: int, length: int) -> int:
        return self.snapshots.longest(source, length)

    def copy(self, source: int, target: int, length: int) -> None:
        place = self.snapshots.place(source, length)
        assert place is not None
        self.snapshots.release(target)
        self.snapshots.share(source, target, length)
        for buffer in self._tensors():
            buffer[self.slots + target] = buffer[_TEXT * self.slots + place]
        self.at[0, target], self.at[1, target] = -1, length

    def move(self, source: int, target: int, length: int) -> None:
        for buffer in self._tensors():
            of_texts = self._of_texts(buffer)
            of_texts[:, target] = of_texts[:, source]
        self.at[:, target] = self.at[:, source]
        self.snapshots.release(target)
        self.snapshots.move(source, target)

    def clear(self, slot: int, length: int | None = None) -> None:
        freed = self.snapshots.release(slot)
        for buffer in self._tensors():
            self._of_texts(buffer)[:, slot] = 0
            for place in freed:
                buffer[_TEXT * self.slots + place] = 0
        self.at[:, slot] = -1

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        # The present length names the state from before the step.
        at = self.at[:, rows]
        gone = which & (at != lengths)
        at.masked_fill_(gone, -1)
        for buffer in self._tensors():
            gone_there = gone.to(buffer.device).view(*gone.shape, *[1] * (buffer.dim() - 1))
            self._of_texts(buffer)[:, rows].masked_fill_(gone_there, 0)

    def zero(self) -> None:
        for buffer in self._tensors():
            devices.zero_untouched(buffer if buffer.is_contiguous() else buffer.mT)
        self.at.fill_(-1)
        self.snapshots = Snapshots(self.slots)

    def _tensors(self) -> Iterator[Tensor]:
        for states in self.buffers.values():
            yield from states.values()

    def _of_texts(self, buffer: Tensor) -> Tensor:
        """Return `[2, S, ...]` of a buffer."""
        of_texts: Tensor = buffer[: _TEXT * self.slots].unflatten(0, (_TEXT, self.slots))
        return of_texts


def _zeros(count: int, shape: StateShape, *, transposed: bool) -> Tensor:
    """Return zeros for `count` states."""
    if not transposed:
        return devices.zeros((count, *shape.sizes), shape.dtype, shape.device)
    *others, rows, columns = shape.sizes
    return devices.zeros((count, *others, columns, rows), shape.dtype, shape.device).mT


class StateView(LayerView):
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

    @property
    def texts(self) -> Texts:
        """The nodes as the native library runs them, made once for all layers of a forward."""
        if self.cache.texts is None:
            nodes, (rows, size), writes = self.nodes, self.nodes.tokens.shape, torch.empty(0, 3, dtype=torch.long)
            which, parents = torch.arange(rows * size) if nodes.packing is None else nodes.packing.nodes, None
            if isinstance(nodes, TreeNodes):
                parents = nodes.parents
            elif isinstance(nodes, PromptNodes):
                writes = self.cache.writes(nodes)
            self.cache.texts = Texts(rows, size, which, parents, self._index, writes)
        return self.cache.texts

    @cached_property
    def paths(self) -> TreePaths:
        nodes = self.nodes
        assert isinstance(nodes, TreeNodes)
        return TreePaths(nodes.parents, nodes.ancestors)

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise TypeError("states are read and written by their mixers, not by attention")


def view_in(cache: object) -> StateView | None:
    """Return the view of states in a cache of `TargetCache.view`, or None for another cache."""
    last = cache.layers[-1] if isinstance(cache, Cache) and cache.layers else None
    return last if isinstance(last, StateView) else None

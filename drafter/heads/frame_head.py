"""Heads that draft from frames, and readers of the slots' texts with a KV cache.

A draft module computes `T` frame states for each pending token. Two implementations must agree: many anchors of a known
text at once (training, simulated walks), and step by step for the engine's slots (decoding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan, SlotState
from drafter.drafters.slots import SlotTensors
from drafter.drafters.target import Target
from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead
from drafter.native.build import BuildError, UnsuitableError
from drafter.target_model.cache import Rows
from drafter.target_model.kv_cache import LayerShape
from drafter.target_model.prepacked import prepack
from drafter.tree.token_tree import TokenTree

# Rotary positions (arXiv 2104.09864).


def rotary_rates(theta: float, size: int, device: torch.device) -> Tensor:
    """Return the rotation angle per position, `[size / 2]` float64, for heads of width `size`."""
    half = size // 2
    return theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)


def rotation_table(rates: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return cosine and signed sine (first half negative) of positions `0..length-1`, `[length, 2, D]`."""
    angles = torch.arange(length, device=rates.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[..., D]` to their positions; `cos` and `sin` (first half negative) must broadcast to them."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


# KV cache of every slot's context. An entry of it is a token and the target model's hidden state before it. E entries
# of several texts are given by their slots `[E]`, and by their distances back `[E]` from the slots' pending tokens.

_CONTEXT_BUCKET = 64  # context lengths are rounded up to a multiple of this, so that shapes repeat
_PROMPT_ENTRIES = 4096  # most prompt entries read in one forward


class ContextReader(ABC):
    """Reads each sequence's new tokens, ordinarily at most `fresh` per step, into a KV cache, which is allocated once.

    Args:
        rates: Rotary angles per position, `[D / 2]` float64 on the device.
        layers: Layers of the cache.
        heads: Key heads of a layer, each of width D.
        behind: Positions after the pending token's that the module writes to or rotates to.
    """

    bounded = True
    slots: Sequence[SlotState] = ()

    def __init__(self, base: Target, fresh: int, rates: Tensor, *, layers: int, heads: int, behind: int = 0) -> None:
        self._base, self._rates, self._behind, self._layers = base, rates, behind, layers
        self._shape = LayerShape(heads, 2 * len(rates), 2 * len(rates), base.dtype, base.device)
        self.bytes_per_token = layers * self._shape.bytes_per_token
        # The host of a GPU is a step behind and does not know how many entries are new. There a step takes the same
        # number of entries from every row, enough for two steps.
        self._late = devices.is_asynchronous(base.device)
        self._usual = 2 * fresh if self._late else fresh

    @abstractmethod
    def _read(self, context: DraftContext, slots: Tensor, back: Tensor) -> Any:
        """Read entries into the cache."""

    def open(self, loan: Loan) -> None:
        shape, device = self._shape, self._shape.device
        self._length = loan.length + self._behind + 1
        # `[layers, 2, slots · length, H, D]`, keys first.
        size = (self._layers, 2, loan.slots * self._length, shape.heads, shape.key_dim)
        self._cache = devices.zeros(size, shape.dtype, device)
        by_slot = self._cache.unflatten(2, (loan.slots, self._length)).movedim((2, 3), (0, 1))
        self._entries = SlotTensors(Rows([by_slot]), self._usual, self._behind)
        self.slots = [self._entries]
        self._rotation = rotation_table(self._rates, self._length, shape.dtype)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(loan.slots, device=device)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new entries than an ordinary step reads."""
        late, unread = self._entries.advance(context)
        if len(late):
            slots, back = _last_entries(late, unread)
            for first in range(0, len(slots), _PROMPT_ENTRIES):
                some = slice(first, first + _PROMPT_ENTRIES)
                self._read(context, *self._sent(slots[some], back[some]))

    def _texts(self, rows: int, longest: int) -> Tensor:
        """Return the cache of `rows` rows, with room for `longest` entries, `[layers, 2, rows, S, H, D]`."""
        bound = min(-(-longest // _CONTEXT_BUCKET) * _CONTEXT_BUCKET, self._length)
        texts: Tensor = self._cache.unflatten(2, (-1, self._length))
        return texts[:, :, :rows, :bound]

    def _store(self, places: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[1, E, H, D]` to `places` `[E]` of the flattened cache."""
        self._cache[layer, 0].index_copy_(0, places, keys[0])
        self._cache[layer, 1].index_copy_(0, places, values[0])

    def _inputs(self, context: DraftContext, slots: Tensor, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions `[E]`, embeddings `[E, d]` and the hidden states before the entries `[E, K · d]`.

        The hidden state before the beginning of a text is zero.
        """
        assert context.hidden is not None
        # A text shorter than `_usual` has its first entry asked for several times; it is the same each time.
        positions = (context.lengths[slots] - back).clamp_min(0)
        hidden = context.hidden[slots, (positions - 1).clamp_min(0)].to(self._base.dtype) * (positions > 0)[:, None]
        return positions, self._base.embed(context.tokens[slots, positions]), hidden

    def _recent(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the possibly new entries of `rows` rows, and the indices of the pending tokens' entries, `[rows]`."""
        if not self._late:
            new = self._entries.new
            return *self._sent(*_last_entries(np.arange(rows), new)), torch.from_numpy(new.cumsum() - 1)
        back = torch.arange(self._usual - 1, -1, -1, device=self._slot.device)
        slots = self._slot[:rows, None].expand(-1, self._usual)
        return slots.flatten(), back.repeat(rows), (self._slot[:rows] + 1) * self._usual - 1

    def _sent(self, slots: Ids, back: Ids) -> tuple[Tensor, Tensor]:
        device = self._base.device
        return devices.send(torch.from_numpy(slots), device), devices.send(torch.from_numpy(back), device)


def _last_entries(slots: Ids, counts: Ids) -> tuple[Ids, Ids]:
    """Return slots and distances from the pending token of the last `counts` `[B]` entries of `slots` `[B]`."""
    ends = counts.cumsum()
    return slots.repeat(counts), ends.repeat(counts) - 1 - np.arange(counts.sum())


# Draft modules, and the drafter that searches their frames.

Search = Callable[[Tensor, Tensor, int, float], TokenTree]
"""Frame states `[B, F, d]`, recent tokens `[B, recent_tokens]`, size, `Ask.least_probability` → trees `[B, size]`."""


class DraftModule(nn.Module, ABC):
    """Computes T = `num_frames` frame states from tokens and the target model's hidden states."""

    num_frames: int

    @abstractmethod
    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, F, d]` at many `anchors` `[B, A]` of known texts, equal to those of decoding.

        `embeddings` `[B, L, d]` are the tokens', `hidden` `[B, L, K · d]` the states of `DraftHead.hidden_layers`,
        which are not read from an anchor on. Of T frames only the first F = `count` are computed, or see each other.
        """

    @abstractmethod
    def reader(self, base: Target, fresh: int) -> FrameReader:
        """Return what computes the frames of the engine's slots with the present weights, which are then frozen.

        An ordinary step adds at most `fresh` tokens to a sequence.
        """


class FrameReader(ABC):
    """Computes a module's frames for the engine's slots, step by step. See `Drafter` and `DraftSpec` for the rest."""

    bounded: bool = False
    bytes_per_token: int = 0
    slots: Sequence[SlotState] = ()

    def open(self, loan: Loan) -> None:  # noqa: B027 - a reader without memory has nothing to do
        pass

    def prepare(self, context: DraftContext) -> None:  # noqa: B027
        pass

    @abstractmethod
    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Return the first `count` frames (default: all) of the context's rows, `[B, F, d]`; see `Drafter.propose`."""


class FrameDrafter(Drafter):
    """Searches the frames of a head's module for trees; see `DraftHead.drafter`."""

    def __init__(self, head: FrameHead, base: Target, nodes: int, tree: Tree) -> None:
        depth = head.config.depth
        self._reader = reader = head.module.reader(base, depth + 1)
        self.spec = DraftSpec(
            nodes, depth, head.hidden_layers, bounded=reader.bounded, bytes_per_token=reader.bytes_per_token
        )
        self._head, self._base, self._tree, self._search = head, base, tree, head.prepared_search(base, tree)
        self._weights = base.weights_version

    def open(self, loan: Loan) -> None:
        self._times = loan.times
        self._reader.open(loan)
        self.slots = self._reader.slots

    def prepare(self, context: DraftContext) -> None:
        if self._weights != self._base.weights_version:
            self._weights = self._base.weights_version
            self._derive_again()
        self._reader.prepare(context)

    def _derive_again(self) -> None:
        """Make again, in place, what was derived from the target model, whose weights have changed in place."""
        if self._head.vocabulary is not None:
            self._head.vocabulary.borrow_again(self._base)
        self._head.weights_changed(self._base)
        if not devices.is_asynchronous(self._base.device):  # there the search is part of graphs that are recorded
            self._search = self._head.prepared_search(self._base, self._tree)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        size = ask.nodes + 1
        states = self._reader.read(context, self._head.frames_for(size, self._tree))
        self._times.mark("draft")
        recent = last_tokens(context.tokens, context.lengths[:, None], self._head.recent_tokens)[:, 0]
        return self._head.name_nodes(self._search(states, recent, size, ask.least_probability))


def all_hidden_before(hidden: Tensor) -> Tensor:
    """Return the hidden state before each position, as `hidden` `[B, L, d]`; zeros at the beginning of a text."""
    return torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)


def hidden_before(hidden: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden state before each of `anchors` `[B, A]`, `[B, A, d]`; zeros at the beginning of a text."""
    index = (anchors - 1).clamp_min(0)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return torch.where((anchors > 0)[:, :, None], hidden.gather(1, index), 0.0)


class LastHidden(DraftModule, FrameReader):
    """Frames of the hidden state before the pending token alone. Here its one frame is that state itself."""

    num_frames = 1

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        return self.frames(hidden_before(hidden, anchors), count)

    def frames(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return the first `count` frames (default: all), `[..., F, d]`, of hidden states `[..., d]`."""
        return hidden.unsqueeze(-2)

    def reader(self, base: Target, fresh: int) -> FrameReader:
        prepack(self)
        return self

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        assert context.hidden is not None
        return self.frames(hidden_before(context.hidden, context.lengths[:, None])[:, 0], count)


class ResidualBlocks(LastHidden):
    """Medusa's draft module (arXiv 2401.10774): `frame_j = h + SiLU(W_j h)`.

    `W_j` starts at zero, so every frame starts as `h`. Frames see neither the pending token nor earlier text; the
    ablation of arXiv 2412.00061 calls this the linear head.
    """

    def __init__(self, width: int, num_frames: int) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_frames))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def frames(self, hidden: Tensor, count: int | None = None) -> Tensor:
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks[:count]], -2)


class FrameHead(DraftHead):
    """A head of a draft module, which computes frames, and a search, which builds trees."""

    module: DraftModule
    recent_tokens: int = 1
    """Number of last tokens that the search reads, the pending token included."""

    @abstractmethod
    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        """Return trees `[B, size]` whose draft tokens are draft ids; see `DraftVocabulary`.

        `states` `[B, F, d]` are the frames that `frames_for` asks for; `recent` `[B, recent_tokens]` ends with the
        pending token. Prefixes below `least` may be pruned; see `Ask`.
        """

    def native_search(self, base: Target, tree: Tree) -> Search | None:
        """Return the native library's search for the weights as they are now, or None where it has none.

        Raises `BuildError` or `UnsuitableError` where it has one that cannot be used here.
        """
        return None

    def prepared_search(self, base: Target, tree: Tree) -> Search:
        """Return `search` for frozen weights. A head may precompute here whatever depends on these alone."""
        for part in self.children():
            if part is not self.module:  # its reader prepacks it
                prepack(part)
        return lambda states, recent, size, least: self.search(states, recent, base, size, tree, least)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """Return how many leading frames a tree of `size` nodes can use; None for all."""
        return None

    def trees_at(
        self, base: Target, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        self.refuse_tree(tree)
        count = self.frames_for(size, tree)
        states = self.module(base.embed(tokens), hidden, anchors, count).flatten(0, 1)
        recent = last_tokens(tokens, anchors, self.recent_tokens).flatten(0, 1)
        try:
            search = self.native_search(base, tree)
        except (BuildError, UnsuitableError):  # a drafter warns of it, and once; trees of many texts are asked for
            search = None
        if search is None:
            return self.name_nodes(self.search(states, recent, base, size, tree))
        return self.name_nodes(search(states, recent, size, 0.0))

    def drafter(self, base: Target, nodes: int, tree: Tree = "exact") -> FrameDrafter:
        self.refuse_tree(tree)
        return FrameDrafter(self, base, nodes, tree)


def last_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """Return the last `count` of `tokens` `[B, L]` up to each of `anchors` `[B, A]`, its own last, `[B, A, count]`.

    Positions before the beginning of a text repeat its first token.
    """
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)

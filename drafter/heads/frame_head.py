"""Contract between draft modules and the heads that read their frames, and the heads built on it.

A module computes `T` frame states for each pending token. Two implementations must agree: many anchors of a known text
at once (training, simulated walks), and step by step for the engine's slots (decoding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.heads.contract import DraftHead, Tree
from drafter.target.model import BaseModel
from drafter.target.prepacked import prepack
from drafter.tree.token_tree import TokenTree


class DraftModule(nn.Module, ABC):
    """Computes frame states from tokens and the target model's hidden states."""

    num_frames: int
    """T."""

    @abstractmethod
    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames for many anchors of known texts, `[B, A, F, d]`, equal to those of decoding.

        Args:
            embeddings: `[B, L, d]` frozen token embeddings.
            hidden: `[B, L, K · d]` hidden states of `DraftHead.hidden_layers`.
            anchors: `[B, A]` positions of the pending tokens. Hidden states from an anchor on are not read for it.
            count: F, number of leading frames; None for all T. Among frames, a frame sees only these F.
        """

    @abstractmethod
    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader that computes frames step by step, on the target model's device and in its dtype.

        An ordinary step adds at most `fresh` tokens to a sequence.
        """


class SlotReader:
    """A draft module's memory of the sequences in the engine's slots; empty by default.

    Attributes:
        bounded: Drafting reads `DraftContext.longest`.
        bytes_per_token: Memory kept for each position of a slot.
    """

    bounded = False
    bytes_per_token = 0

    def open(self, slots: int, length: int) -> None:
        """Allocate memory for `slots` sequences of `length` tokens and their drafts. Called once."""

    def enter(self, slot: int) -> None:
        """Clear the slot for a new sequence."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the memory of the first `length` tokens of `source` to `target`."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence from slot `source` to slot `target`."""

    def clear(self, slot: int) -> None:
        """Zero the slot's memory; see `Drafter.clear`."""

    def prepare(self, context: DraftContext) -> None:
        """Do the work that drafting must not do. Called before each step, with the same rows; see `Drafter.prepare`."""


class FrameReader(SlotReader, ABC):
    """Computes frames for the engine's slots."""

    @abstractmethod
    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Return the first `count` frames (default: all) of the context's rows, `[B, F, d]`; see `Drafter.propose`."""


def hidden_before(hidden: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden state before each of `anchors` `[B, A]`, `[B, A, d]`; zeros at the beginning of a text."""
    index = (anchors - 1).clamp_min(0)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return torch.where((anchors > 0)[:, :, None], hidden.gather(1, index), 0.0)


def newest_hidden(context: DraftContext) -> Tensor:
    """Return the hidden state before each row's pending token, `[B, d]`."""
    assert context.hidden is not None
    return hidden_before(context.hidden, context.lengths[:, None])[:, 0]


class HeadDrafter(Drafter):
    """Base class of drafters with a head: forwards slot changes to the reader of the head's module."""

    def __init__(self, spec: DraftSpec, reader: SlotReader) -> None:
        self.spec = replace(spec, bounded=reader.bounded, bytes_per_token=reader.bytes_per_token)
        self._slots = reader

    def open(self, loan: Loan) -> None:
        self._times = loan.times
        self._slots.open(loan.slots, loan.length)

    def enter(self, slot: int, text: Ids) -> None:
        self._slots.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        self._slots.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        self._slots.move(source, target)

    def clear(self, slot: int) -> None:
        self._slots.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        self._slots.prepare(context)


Search = Callable[[Tensor, Tensor, int, float], TokenTree]
"""Frame states `[B, F, d]`, recent tokens `[B, recent_tokens]`, size, `Ask.least_probability` → trees `[B, size]`."""


class FrameHead(DraftHead):
    """A head of a draft module, which computes frames, and a search, which builds trees. Its configuration has a
    `depth`.
    """

    module: DraftModule
    recent_tokens: int = 1
    """Number of last tokens that the search reads, the pending token included."""

    @abstractmethod
    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """Return trees `[B, size]` whose draft tokens are draft ids; see `DraftVocabulary`.

        Args:
            states: `[B, F, d]` the frames that `frames_for` asks for.
            recent: `[B, recent_tokens]`, the pending token last.
        """

    def prepared_search(self, base: BaseModel, tree: Tree) -> Search:
        """Return `search` for frozen weights.

        A head may precompute here whatever depends on the weights alone. The search may use `Ask.least_probability` to
        prune improbable prefixes.
        """
        self.prepack_search()
        return lambda states, recent, size, least: self.search(states, recent, base, size, tree)

    def prepack_search(self) -> None:
        """Prepack the weights that a search in PyTorch reads. The module's reader prepacks the module's."""
        for part in self.children():
            if part is not self.module:
                prepack(part)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """Return how many leading frames a tree of `size` nodes can use; None for all."""
        return None

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` if the head has no such tree."""

    def trees_at(
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        self.refuse_tree(tree)
        count = self.frames_for(size, tree)
        states = self.module(base.embed(tokens), hidden, anchors, count).flatten(0, 1)
        recent = last_tokens(tokens, anchors, self.recent_tokens).flatten(0, 1)
        return self.name_nodes(self.search(states, recent, base, size, tree))

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> FrameDrafter:
        self.refuse_tree(tree)
        return FrameDrafter(self, base, nodes, tree)


class FrameDrafter(HeadDrafter):
    """Drafts with a `FrameHead`; see `DraftHead.drafter`."""

    def __init__(self, head: FrameHead, base: BaseModel, nodes: int, tree: Tree) -> None:
        spec = DraftSpec(nodes, head.config.depth, hidden_layers=head.hidden_layers)
        reader = head.module.reader(base, spec.max_depth + 1)
        super().__init__(spec, reader)
        self._reader: FrameReader = reader
        self._recent_tokens = head.recent_tokens
        self._search, self._name_nodes = head.prepared_search(base, tree), head.name_nodes
        self._frames_for = partial(head.frames_for, tree=tree)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        size = ask.nodes + 1
        states = self._reader.read(context, self._frames_for(size))
        self._times.mark("draft")
        recent = last_tokens(context.tokens, context.lengths[:, None], self._recent_tokens)[:, 0]
        return self._name_nodes(self._search(states, recent, size, ask.least_probability))


def last_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """Return the last `count` of `tokens` `[B, L]` up to each of `anchors` `[B, A]`, its own last, `[B, A, count]`.

    Positions before the beginning of a text repeat its first token.
    """
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)


class LastHidden(DraftModule):
    """A module without parameters: its one frame is the hidden state before the pending token."""

    num_frames = 1

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        return hidden_before(hidden, anchors)[:, :, None]

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        return _LastHiddenReader(base.dtype)


class _LastHiddenReader(FrameReader):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return newest_hidden(context)[:, None].to(self._dtype)


class ResidualBlocks(DraftModule):
    """Medusa's draft module (arXiv 2401.10774): `frame_j = h + SiLU(W_j h)`.

    `W_j` starts at zero, so every frame starts as `h`. Frames see neither the pending token nor earlier text; the
    ablation of arXiv 2412.00061 calls this the linear head.
    """

    def __init__(self, width: int, num_frames: int) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_frames))
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        return self.frames(hidden_before(hidden, anchors), count)

    def frames(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return the first `count` frames (default: all), `[..., F, d]`, of hidden states `[..., d]`."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks[:count]], -2)

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        prepack(self)
        return _ResidualReader(self, base.dtype)


class _ResidualReader(FrameReader):
    def __init__(self, module: ResidualBlocks, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return self._module.frames(newest_hidden(context).to(self._dtype), count)

"""The contract between draft modules and the heads that read their frames.

A module computes `T` frame states for each pending token from the text so far. It does so in two ways that must agree:
for many anchors of a known text (training, simulated walks), and step by step for the engine's slots (decoding).
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
    """Frame states from tokens and the base's hidden states."""

    num_frames: int
    """T."""

    @abstractmethod
    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames for many anchors of known texts, each as decoding would compute it there, `[B, A, F, d]`.

        Args:
            embeddings: `[B, L, d]` frozen embeddings of the tokens.
            hidden: `[B, L, K · d]` the base's hidden states that the head reads, `DraftHead.hidden_layers`.
            anchors: `[B, A]` positions of the pending tokens. Hidden states from an anchor on are not read for it.
            count: F, number of frames, counted from the first; None for all T. Frames that attend to one another may
                attend to these F only.
        """

    @abstractmethod
    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader that computes frames step by step, on the base's device and in its dtype.

        Args:
            base: Lends its embedding.
            fresh: Tokens that an ordinary step adds to a sequence at most.
        """


class SlotReader:
    """What a draft module remembers of the sequences in the engine's slots: by itself, nothing.

    Attributes:
        bounded: Whether drafting looks at `DraftContext.longest`.
        bytes_per_token: Memory that it keeps for each position of a slot.
    """

    bounded = False
    bytes_per_token = 0

    def open(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens and the drafts behind them. Called once."""

    def enter(self, slot: int) -> None:
        """Forget what was read in `slot`: a new sequence enters."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` have what was read of the first `length` tokens in `source`."""

    def move(self, source: int, target: int) -> None:
        """Let the sequence in slot `source` go on in slot `target`."""

    def clear(self, slot: int) -> None:
        """Set all numbers kept for `slot` to zero; see `Drafter.clear`."""

    def prepare(self, context: DraftContext) -> None:
        """Do what drafting must not do. Comes before each step, with the same rows; see `Drafter.prepare`."""


class FrameReader(SlotReader, ABC):
    """Computes frames for the engine's slots."""

    @abstractmethod
    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Return the first `count` frames, or all, `[B, F, d]` of the context's rows; see `Drafter.propose`."""


def hidden_before(hidden: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden state before each anchor, `[B, A, d]`; zeros before the beginning of the text.

    Args:
        hidden: `[B, L, d]`.
        anchors: `[B, A]` positions.
    """
    index = (anchors - 1).clamp_min(0)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return torch.where((anchors > 0)[:, :, None], hidden.gather(1, index), 0.0)


def newest_hidden(context: DraftContext) -> Tensor:
    """Return the hidden state before each row's pending token, `[B, d]`."""
    assert context.hidden is not None
    return hidden_before(context.hidden, context.lengths[:, None])[:, 0]


# ---- What all drafters of heads share: they pass on what happens to the sequences to the reader of the head's module.


class HeadDrafter(Drafter):
    """Keeps a reader informed.

    Args:
        spec: What the drafter needs; the reader says what it looks at and keeps.
        reader: What the head's module remembers.
    """

    def __init__(self, spec: DraftSpec, reader: SlotReader) -> None:
        self.spec = replace(spec, bounded=reader.bounded, bytes_per_token=reader.bytes_per_token)
        self._slots = reader

    def open(self, loan: Loan) -> None:
        """Make room for the module's memory."""
        self._times = loan.times
        self._slots.open(loan.slots, loan.length)

    def enter(self, slot: int, text: Ids) -> None:
        """Forget the sequence before: nothing of the new one has been read."""
        self._slots.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what was read of the common beginning."""
        self._slots.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move what was read of the sequence."""
        self._slots.move(source, target)

    def clear(self, slot: int) -> None:
        """Set what the module remembers of the slot to zero."""
        self._slots.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step brings."""
        self._slots.prepare(context)


# ---- Heads that draft from frames: a draft module computes frame states, and a search makes trees of them.

Search = Callable[[Tensor, Tensor, int, float], TokenTree]
"""Frame states `[B, F, d]`, recent tokens `[B, recent_tokens]`, size, `Ask.least_probability` → trees `[B, size]`."""


class FrameHead(DraftHead):
    """A head made of a draft module and a search. Its configuration has a `depth`."""

    module: DraftModule
    recent_tokens: int = 1
    """Number of the text's last tokens that the search reads, the pending token included."""

    @abstractmethod
    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """Return trees `[B, size]` whose draft nodes have draft ids; see `DraftVocabulary`.

        Args:
            states: `[B, F, d]` the frame states that `frames_for` asks for.
            recent: `[B, recent_tokens]` last tokens, the pending token last.
            base: Lends its embedding and LM head.
            size: Nodes of a tree, root included.
            tree: As in `DraftHead.drafter`.
        """

    def prepared_search(self, base: BaseModel, tree: Tree) -> Search:
        """Return `search` for weights that no longer change.

        A head may compute here, once, whatever follows from the weights alone. The search that it returns may use
        `Ask.least_probability` to leave out improbable prefixes.
        """
        self.prepack_search()
        return lambda states, recent, size, least: self.search(states, recent, base, size, tree)

    def prepack_search(self) -> None:
        """Lay out the weights that a search in PyTorch reads. The module's reader sees to those of the module."""
        for part in self.children():
            if part is not self.module:
                prepack(part)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """Return how many frames a tree of `size` nodes can use, counted from the first; None for all."""
        return None

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` if the head has no such tree."""

    def trees_at(
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """Return trees `[B * A, size]` at `anchors` `[B, A]`; see `DraftHead.trees_at`."""
        self.refuse_tree(tree)
        count = self.frames_for(size, tree)
        states = self.module(base.embed(tokens), hidden, anchors, count).flatten(0, 1)
        recent = last_tokens(tokens, anchors, self.recent_tokens).flatten(0, 1)
        return self.name_nodes(self.search(states, recent, base, size, tree))

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> FrameDrafter:
        """See `DraftHead.drafter`."""
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
        """Read the new tokens, compute the frames and return the best trees `[B, 1 + ask.nodes]`."""
        size = ask.nodes + 1
        states = self._reader.read(context, self._frames_for(size))
        self._times.mark("draft")
        recent = last_tokens(context.tokens, context.lengths[:, None], self._recent_tokens)[:, 0]
        return self._name_nodes(self._search(states, recent, size, ask.least_probability))


def last_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens up to each anchor, the anchor's own token last, `[B, A, count]`.

    Args:
        tokens: `[B, L]`.
        anchors: `[B, A]` positions.
        count: Number of tokens. Before the beginning of the text they are its first token.
    """
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)


# ---- A draft module without parameters: the base's last hidden state is the only frame.


class LastHidden(DraftModule):
    """One frame: the hidden state before the pending token."""

    num_frames = 1

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, 1, d]`; see `DraftModule.forward`."""
        return hidden_before(hidden, anchors)[:, :, None]

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader without memory."""
        return _LastHiddenReader(base.dtype)


class _LastHiddenReader(FrameReader):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return newest_hidden(context)[:, None].to(self._dtype)


# ---- One residual block per frame on the last hidden state: Medusa's draft module (arXiv 2401.10774). The frames see
# neither the pending token nor the text before it; the ablation of arXiv 2412.00061 calls this the linear head.


class ResidualBlocks(DraftModule):
    """`frame_j = h + SiLU(W_j h)`. `W_j` starts at zero, so every frame starts as the base's own state.

    Args:
        width: d.
        num_frames: T.
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
        """Return frames `[B, A, F, d]`; see `DraftModule.forward`."""
        return self.frames(hidden_before(hidden, anchors), count)

    def frames(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return the first `count` frames, or all, `[..., F, d]` of hidden states `[..., d]`."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks[:count]], -2)

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader without memory."""
        prepack(self)
        return _ResidualReader(self, base.dtype)


class _ResidualReader(FrameReader):
    def __init__(self, module: ResidualBlocks, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        return self._module.frames(newest_hidden(context).to(self._dtype), count)

"""Heads that draft from frames: a draft module computes frame states, and a search makes trees of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import prepack
from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.heads.contract import DraftHead, Tree
from drafter.heads.modules.contract import DraftModule
from drafter.tree.token_tree import TokenTree

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

    def name_nodes(self, tree: TokenTree) -> TokenTree:
        """Return a tree of tokens, of one that `search` has found."""
        return tree if self.vocabulary is None else self.vocabulary.name_nodes(tree)

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


class FrameDrafter(Drafter):
    """Drafts with a `FrameHead`; see `DraftHead.drafter`."""

    def __init__(self, head: FrameHead, base: BaseModel, nodes: int, tree: Tree) -> None:
        depth = head.config.depth
        self._recent_tokens = head.recent_tokens
        self._reader = head.module.reader(base, depth + 1)
        self.spec = DraftSpec(
            nodes,
            depth,
            hidden_layers=(LM_HEAD_INPUT,),
            bounded=self._reader.bounded,
            bytes_per_token=self._reader.bytes_per_token,
        )
        self._search, self._name_nodes = head.prepared_search(base, tree), head.name_nodes
        self._frames_for = partial(head.frames_for, tree=tree)

    def open(self, loan: Loan) -> None:
        """Make room for the module's memory."""
        self._times = loan.times
        self._reader.open(loan.slots, loan.length)

    def enter(self, slot: int, text: Ids) -> None:
        """Forget the sequence before: nothing of the new one has been read."""
        self._reader.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what was read of the common beginning."""
        self._reader.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move what was read of the sequence."""
        self._reader.move(source, target)

    def clear(self, slot: int) -> None:
        """Set what the module remembers of the slot to zero."""
        self._reader.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step brings."""
        self._reader.prepare(context)

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

"""What heads that draft from frames share: a module makes frame states, a search makes trees of them."""

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
    """How many of the text's last tokens the search looks at, the pending one included."""

    @abstractmethod
    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """Trees of `size` nodes, root included.

        Args:
            states: `[B, F, d]` frame states, as many as `frames_for` says.
            recent: `[B, recent_tokens]` last tokens, the pending one last.
            base: Lends its embedding and LM head.
            size: Nodes of a tree.
            tree: As in `DraftHead.drafter`.
        """

    def prepared_search(self, base: BaseModel, tree: Tree) -> Search:
        """`search` of weights that change no more: what follows from them alone may be computed here, once.

        It may make use of `Ask.least_probability`, too.
        """
        return lambda states, recent, size, least: self.search(states, recent, base, size, tree)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """How many frames, the first ones, trees of `size` nodes can be made of; None for all of them."""
        return None

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` for a kind of tree that the head does not have."""

    def trees_at(
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """Trees `[B * A, size]` at `anchors` `[B, A]`; see `DraftHead.trees_at`."""
        self.refuse_tree(tree)
        count = self.frames_for(size, tree)
        states = self.module(base.embed(tokens), hidden, anchors, count).flatten(0, 1)
        return self.search(states, last_tokens(tokens, anchors, self.recent_tokens).flatten(0, 1), base, size, tree)

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> FrameDrafter:
        """See `DraftHead.drafter`."""
        self.refuse_tree(tree)
        prepack(self)
        return FrameDrafter(self, base, nodes, tree)


class FrameDrafter(Drafter):
    """Drafts with a `FrameHead`, which makes it."""

    def __init__(self, head: FrameHead, base: BaseModel, nodes: int, tree: Tree) -> None:
        self.spec = DraftSpec(nodes, head.config.depth, hidden_layers=(LM_HEAD_INPUT,))
        self._recent_tokens = head.recent_tokens
        self._reader = head.module.reader(base, self.spec.max_depth + 1)
        self._search = head.prepared_search(base, tree)
        self._frames_for = partial(head.frames_for, tree=tree)

    def open(self, loan: Loan) -> None:
        """Make room for what the module remembers."""
        self._times = loan.times
        self._reader.open(loan.slots, loan.length)

    def enter(self, slot: int, text: Ids) -> None:
        """Forget the sequence before: nothing of the new one has been read."""
        self._reader.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what was read of the common beginning."""
        self._reader.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move what was read of the sequence with it."""
        self._reader.move(source, target)

    def clear(self, slot: int) -> None:
        """Set what the module remembers of the slot to zero."""
        self._reader.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read what is more than an ordinary step brings."""
        self._reader.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`: read what is new, compute the frames, search."""
        size = ask.nodes + 1
        states = self._reader.read(context, self._frames_for(size))
        self._times.mark("draft")
        recent = last_tokens(context.tokens, context.lengths[:, None], self._recent_tokens)[:, 0]
        return self._search(states, recent, size, ask.least_probability)


def last_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """`[B, A, count]` the last tokens of `tokens` `[B, L]` up to each of `anchors` `[B, A]`, the anchor's own last."""
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)

"""What heads that draft from frames share: a module makes frame states, a search makes trees of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import prepack
from drafter.drafters.contract import DraftContext, Drafter
from drafter.heads.contract import DraftHead, Tree
from drafter.heads.modules.contract import DraftModule
from drafter.tree.token_tree import TokenTree

Search = Callable[[Tensor, Tensor, int, float], TokenTree]
"""Frame states `[B, F, d]`, recent tokens `[B, recent_tokens]`, a size and `DraftContext.least` → trees `[B, size]`."""


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

        It may make use of `DraftContext.least`, too.
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

    def drafter(self, base: BaseModel, tree_size: int, tree: Tree = "exact") -> FrameDrafter:
        """See `DraftHead.drafter`."""
        self.refuse_tree(tree)
        prepack(self)
        return FrameDrafter(self, base, tree_size, tree)


class FrameDrafter(Drafter):
    """Drafts with a `FrameHead`, which makes it."""

    reads_hidden = True

    def __init__(self, head: FrameHead, base: BaseModel, tree_size: int, tree: Tree) -> None:
        self.tree_size, self.depth = tree_size, head.config.depth
        self._recent_tokens = head.recent_tokens
        self._reader = head.module.reader(base, self.depth + 1)
        self._search = head.prepared_search(base, tree)
        self._frames_for = partial(head.frames_for, tree=tree)

    def allocate(self, slots: int, length: int) -> None:
        """Make room for what the module remembers."""
        self._reader.allocate(slots, length)

    def admit(self, slot: int) -> None:
        """Nothing of the slot's new row has been read."""
        self._reader.admit(slot)

    def move(self, source: int, target: int) -> None:
        """What was read of the row moves with it."""
        self._reader.move(source, target)

    def catch_up(self, context: DraftContext) -> None:
        """Read what is more than an ordinary step brings."""
        self._reader.catch_up(context)

    def propose(self, context: DraftContext, size: int) -> TokenTree:
        """Trees `[B, size]`: read what is new, compute the frames, search."""
        states = self._reader.read(context, self._frames_for(size))
        recent = last_tokens(context.tokens, context.lengths[:, None], self._recent_tokens)[:, 0]
        return self._search(states, recent, size, context.least)


def last_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """`[B, A, count]` the last tokens of `tokens` `[B, L]` up to each of `anchors` `[B, A]`, the anchor's own last."""
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)

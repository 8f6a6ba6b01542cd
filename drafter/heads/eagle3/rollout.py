"""Drafts under way: EAGLE-3's layer run on its own outputs behind known texts. Training and decoding share it."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.heads.eagle3.draft_layer import DraftLayer, KnownTexts, Projected, attend


class Rollout:
    """R drafts, each of which grows by some nodes at a time.

    Args:
        layer: The layer.
        texts: The texts, pending tokens included.
        pending: `[R]` the pending tokens' entries, whose keys and values are among those of the texts.
    """

    def __init__(self, layer: DraftLayer, texts: KnownTexts, pending: Projected) -> None:
        self._layer, self._texts, self._pending = layer, texts, pending
        self._keys, self._values = pending.keys[:, None][:, :0], pending.values[:, None][:, :0]

    def start(self) -> Tensor:
        """Return the outputs `[R, 1, d]` at the pending tokens."""
        pending = self._pending
        nothing = self._texts.sees[:, None, :0]
        mixed = attend(pending.queries[:, None], self._texts, self._keys, self._values, nothing)
        return self._layer.finish(pending.residual[:, None], mixed)

    def grow(self, embeddings: Tensor, hidden: Tensor, rotation: Tensor, sees: Tensor) -> Tensor:
        """Return the outputs `[R, F, d]` at new nodes.

        Args:
            embeddings: `[R, F, d]` of their tokens.
            hidden: `[R, F, d]` outputs at the nodes before them.
            rotation: `[R, F, 2, D]` at their positions.
            sees: `[R, F, P]` bool, which of the P nodes so far, themselves included, each attends to.
        """
        new = self._layer.project(embeddings, hidden, rotation)
        self._keys, self._values = torch.cat([self._keys, new.keys], 1), torch.cat([self._values, new.values], 1)
        return self._layer.finish(new.residual, attend(new.queries, self._texts, self._keys, self._values, sees))


def sees_entries(place: Tensor, anchors: Tensor) -> Tensor:
    """Return which entries of its text a draft attends to, `[R, S]` bool.

    The first token of a text has no hidden state before it, so it makes no entry. A draft behind that token alone
    starts from an entry with a hidden state of zero.

    Args:
        place: `[S]` positions of the entries.
        anchors: `[R]` positions of the pending tokens.
    """
    anchors = anchors[:, None]
    return (place <= anchors) & ((place > 0) | (anchors == 0))

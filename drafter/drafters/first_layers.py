"""The target model's first layers as a draft model: self-speculation by early exit.

The layers run on the keys and values that the target model's own forwards have left, so that nothing of a text is read
twice, and what a text has beside its tokens is seen, too. A step's draft tokens are written behind the text, where the
forward that verifies them writes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Ids, Loan
from drafter.drafters.model_drafter import DEPTH, ModelDrafter
from drafter.errors import LoadError
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.token_tree import TokenTree, most_places

BEAM = 8
"""Nodes run per level."""


class FirstLayersDrafter(ModelDrafter):
    """Drafts with the first `layers` of the target model; raises `LoadError` if it does not have so many.

    Args:
        output: Makes logits `[..., V']` of the last of these layers' outputs `[..., d]`; None is what the model does.
        tokens: `[V']` tokens of these logits; None for the vocabulary's first ones.
    """

    def __init__(
        self,
        base: BaseModel,
        layers: int,
        nodes: int,
        depth: int = DEPTH,
        output: Callable[[Tensor], Tensor] | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        if not 1 <= layers <= base.num_layers:
            raise LoadError(f"{base.name} has {base.num_layers} layers, so {layers} of them cannot draft: give fewer")
        super().__init__(base, base, nodes, depth, BEAM)
        places = most_places(self.spec.max_depth, nodes + 1, BEAM)
        self.spec = replace(self.spec, bytes_per_token=0, run=places)
        self._usual, self._first = 1, layers  # all tokens but the pending one have been read
        self._output, self._tokens = output, tokens

    def open(self, loan: Loan) -> None:
        assert loan.cache is not None, "an exit drafts where the target model is"
        self._times = loan.times
        self.cache = self._model.first_layers(loan.cache, self._first)
        self._packs = self._model.allow_packing()

    def prepare(self, context: DraftContext) -> None:
        """Do nothing: there are no texts to read."""

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Grow trees `[B, 1 + ask.nodes]`, and zero what is not finite of the keys and values that they have left."""
        rows = len(context.tokens)
        self._broken = torch.zeros(rows, dtype=torch.bool, device=context.tokens.device)
        self._shift = context.shift
        tree = super().propose(context, ask)
        if devices.is_asynchronous(self._broken.device) or bool(self._broken.any()):
            self.cache.scrub(context.lengths, self.spec.run, self._broken, slice(0, rows))
        return tree

    def _unread(self, rows: int) -> Ids:
        return np.ones(rows, dtype=np.int64)

    def _logits(self, nodes: TreeNodes) -> Tensor:
        nodes = replace(nodes, shift=self._shift)
        if self._output is not None:
            nodes = replace(nodes, logits=False, hidden_layers=(self._first - 1,))
        logits, states = self._model.forward(self.cache, nodes)
        packing = nodes.packing
        states = states if packing is None else packing.pack(states)
        finite = states.isfinite().all(2)
        if packing is not None:
            finite = packing.unpack(finite)
        # A masked position takes part in attention with weight zero, and zero times NaN is NaN.
        self._broken |= ~finite.all(1)
        if self._output is None:
            assert logits is not None
            return logits
        return self._output(states) if packing is None else packing.unpack(self._output(states))

    def _named(self, ids: Tensor) -> Tensor:
        return ids if self._tokens is None else self._tokens[ids]

"""A drafter that knows the text, and is right as often as it is told: draft models of every quality, at no cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec
from drafter.tree.token_tree import TokenTree, from_nodes

_WRONG = 3
"""Token in the place of a right one."""


class Knowing(Drafter):
    """Drafts a chain of one text's next tokens, each right with probability `quality`, and a wrong one beside it.

    Args:
        text: Prompt and output.
    """

    def __init__(self, text: Sequence[int], quality: float, seed: int = 0, nodes: int = 8) -> None:
        self.spec = DraftSpec(nodes, nodes)
        self._text, self._quality, self._rng = list(text), quality, random.Random(seed)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        at = context.host_lengths[0] + 1
        right = self._text[at : at + ask.nodes] or [_WRONG]
        chain = [token if self._rng.random() < self._quality else _WRONG for token in right]
        tokens, parents = [_WRONG + 1, *chain], [-1, -1, *range(1, len(chain))]
        depths = [1, *range(1, len(chain) + 1)]
        falling = [-1.5, *(-0.01 * depth for depth in depths[1:])]
        nodes = torch.tensor([tokens, parents, depths])[:, None]
        return from_nodes(context.pending, nodes[0], nodes[1], nodes[2], torch.tensor([falling]), ask.nodes + 1)

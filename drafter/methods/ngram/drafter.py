"""`ngram`: prompt lookup in the row itself. Needs no training.

After Saxena 2023, *Prompt Lookup Decoding*, with several matches merged into a tree instead of one chain.
"""

from __future__ import annotations

import math

import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loading
from drafter.drafters.prompt_lookup import FADING, lookup
from drafter.tree.token_tree import PAD_TOKEN, TokenTree, from_paths


class NgramDrafter(Drafter):
    """Merges continuations, of `depth` tokens, of the latest `matches` of the row's last one to three tokens."""

    def __init__(self, nodes: int = 16, depth: int = 8, matches: int = 4) -> None:
        self.spec = DraftSpec(nodes, depth)
        self._matches = matches

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        width = context.longest + 1
        tokens, lengths = context.tokens[:, :width], context.lengths.clamp_max(context.longest)
        paths, log_weight = lookup(tokens, lengths, self.spec.max_depth, self._matches)
        fading = torch.arange(1, self.spec.max_depth + 1, device=tokens.device) * math.log(FADING)
        prices = (log_weight[:, :, None] + fading).masked_fill(paths == PAD_TOKEN, -torch.inf)
        return from_paths(context.pending, paths, prices, ask.nodes + 1)


def ngram(loading: Loading) -> NgramDrafter:
    return NgramDrafter(loading.nodes)

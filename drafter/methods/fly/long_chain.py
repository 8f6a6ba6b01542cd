"""`long:N:A`: a chain of N tokens, begun by the drafter A and continued by n-grams of the row's text and the chain.

For verifiers with a long look-ahead, such as `fly`, whose authors draft chains of 15 by a model that n-grams speed up
(Li et al. 2025, arXiv 2511.22972).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Drafter, Loading, MergedDrafter
from drafter.drafters.names import length_and_drafter
from drafter.errors import LoadError
from drafter.methods.ngram.drafter import FADING, lookup
from drafter.tree.token_tree import PAD_TOKEN, TokenTree, from_paths


class LongChainDrafter(MergedDrafter):
    """Drafts the likeliest path of a drafter's tree, and n-grams after it, `length` tokens together."""

    def __init__(self, lower: Drafter, length: int) -> None:
        super().__init__(lower)
        self.spec = replace(
            self.spec,
            max_nodes=max(self.spec.max_nodes, length),
            max_depth=max(self.spec.max_depth, length),
            bounded=True,
        )
        self._length = length

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return chains `[B, 1 + ask.nodes]`; a row without any draft gets a lone root."""
        tree = super().propose(context, ask)
        chain, log_probs = likeliest_path(tree, self._length)
        width = context.longest + 1
        text = F.pad(context.tokens[:, :width], (0, self._length))
        chain, log_probs = extended(text, context.lengths.clamp_max(context.longest), chain, log_probs)
        return from_paths(context.pending, chain[:, None], log_probs[:, None], ask.nodes + 1)


def likeliest_path(tree: TokenTree, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and log prefix probabilities `[B, length]` of the path of first children in `tree` `[B, N]`.

    Past its end there are `PAD_TOKEN` and -inf.
    """
    following = tree.first_children()
    node = torch.zeros_like(tree.tokens[:, :1])
    alive = torch.ones_like(node, dtype=torch.bool)
    tokens, log_probs = [], []
    for _ in range(length):
        child = following.gather(1, node)
        alive = alive & (child < tree.size)
        node = torch.where(alive, child, node)
        tokens.append(torch.where(alive, tree.tokens.gather(1, node), PAD_TOKEN))
        log_probs.append(torch.where(alive, tree.log_probs.gather(1, node), -torch.inf))
    return torch.cat(tokens, 1), torch.cat(log_probs, 1)


def extended(text: Tensor, lengths: Tensor, chain: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Continue chains with what followed the last occurrence of their last tokens.

    A match that reaches the chain's own end is taken to repeat from its start.

    Args:
        text: `[B, L + U]`; `text[b, lengths[b]]` is the row's last token, and what follows is not read.
        lengths: `[B]`, below L.
        chain: `[B, U]` draft tokens, `PAD_TOKEN` past the end.
        log_probs: `[B, U]` log prefix probabilities, falling; -inf past the end.
    """
    most = chain.shape[1]
    place = torch.arange(most, device=chain.device)
    count = (chain >= 0).sum(1)
    both = text.scatter(1, lengths[:, None] + 1 + place, chain.clamp_min(0))
    paths, weight = lookup(both, lengths + count, most, 1)
    step = (place - count[:, None]).clamp_min(0)
    period = (paths[:, 0] >= 0).sum(1, keepdim=True).clamp_min(1)
    is_new = (place >= count[:, None]) & (weight > -torch.inf)
    found = torch.where(is_new, paths[:, 0].gather(1, step % period), PAD_TOKEN)
    last = log_probs.gather(1, (count - 1).clamp_min(0)[:, None])
    begin = torch.where(count[:, None] > 0, last, 0.0) + weight.to(log_probs)
    price = torch.where(found >= 0, begin + (step + 1) * math.log(FADING), -torch.inf)
    old = place < count[:, None]
    return torch.where(old, chain, found), torch.where(old, log_probs, price)


def long_chain(rest: str, loading: Loading) -> LongChainDrafter:
    """Make the drafter `long:N:DRAFTER`.

    Raises:
        LoadError: The name is invalid, or the drafter that begins the chain cannot be loaded.
    """
    found = length_and_drafter(rest)
    if found is None:
        raise LoadError(f"drafter 'long:{rest}': use long:N:DRAFTER, such as long:15:ngram")
    length, name = found
    return LongChainDrafter(loading.load(name), length)

"""FLy (Li et al. 2025, arXiv 2511.22972): the verifier `fly`, and the long chains that it needs, `long:N:A`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, Verified, Verifier
from drafter.acceptance.lenient import lenient_walk, node_views, shannon_entropy
from drafter.drafters.contract import Ask, DraftContext, Drafter, Loading
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.prompt_lookup import FADING, lookup
from drafter.errors import LoadError, RequestError
from drafter.requests import SamplingParams
from drafter.tree.token_tree import PAD_TOKEN, TokenTree, followed, from_paths


class FlyVerifier(Verifier):
    """Accepts a mismatch at entropy of at least θ if the next W - 1 draft tokens are the target model's choices.

    The entropy is that of the three likeliest tokens. As in the authors' code, one more draft token must follow the
    window: a mismatch in the last W positions of a chain is rejected. On a tree this must hold for some path below the
    mismatch. Greedy rows only, as published.

    Args:
        theta: θ in nats. With infinity all mismatches are rejected.
        window: W, deciding draft tokens, from the mismatch on.

    Raises:
        ValueError: θ is negative, or W below 1.
    """

    name = "fly"
    lossless = False

    def __init__(self, theta: float = 0.3, window: int = 6) -> None:
        if not theta >= 0:
            raise ValueError(f"theta must be at least 0, not {theta:g}")
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self._theta, self._window, self.lookahead = theta, window, window

    @property
    def settings(self) -> Mapping[str, float]:
        return {"theta": self._theta, "window": self._window}

    def refuse(self, sampling: SamplingParams) -> None:
        if (temperature := sampling.over().temperature) > 0:
            raise RequestError(
                f"the verifier fly decodes greedily, and temperature is {temperature:g}: "
                "set it to 0, or use the verifier exact or typical"
            )

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        tree = verified.tree
        views = node_views(verified, sampling, leading_entropy)
        exact = tree.tokens == views.choices.gather(1, tree.parents)
        uncertain = views.entropy.gather(1, tree.parents) >= self._theta
        lenient = uncertain & _goes_on(tree, exact, self._window, verified.depth)
        lenient &= views.log_probs > -torch.inf  # what a greedy row may not choose at all
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)


def leading_entropy(log_probs: Tensor) -> Tensor:
    """Return `−Σ p log p` `[R]` over the three most probable tokens of `[R, V]`, without renormalising `p`."""
    return shannon_entropy(log_probs.topk(min(3, log_probs.shape[-1]), dim=-1).values)


def _goes_on(tree: TokenTree, exact: Tensor, window: int, depth: int) -> Tensor:
    """Return which nodes `[B, N]` have a path of `window` draft nodes below, all but the last `exact` `[B, N]`."""
    is_draft = tree.tokens >= 0
    is_draft[:, 0].fill_(False)
    # From the end: after k rounds, whether a node has a valid path of k nodes below it.
    follows = torch.ones_like(is_draft)
    for place in range(min(window, depth + 1)):  # no path below a node is longer than `depth`
        good = is_draft & follows & (exact if place else is_draft)
        follows = torch.zeros_like(tree.tokens).scatter_reduce(1, tree.parents, good.long(), "amax") > 0
    return follows


class LongChainDrafter(MergedDrafter):
    """Drafts the likeliest path of a drafter's tree, continued by n-grams of the row and of the path itself.

    For verifiers with a long look-ahead: FLy's authors draft chains of 15 tokens by a model that n-grams speed up.
    """

    def __init__(self, lower: Drafter, length: int) -> None:
        super().__init__(lower)
        nodes, depth = max(self.spec.max_nodes, length), max(self.spec.max_depth, length)
        self.spec = replace(self.spec, max_nodes=nodes, max_depth=depth, bounded=True)
        self._length = length

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
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
    path = followed(tree.first_children(), length)[:, 1:]
    tree = tree.padded(tree.size + 1)  # past the end of a path stands a padding node
    return tree.tokens.gather(1, path), tree.log_probs.gather(1, path)


def extended(text: Tensor, lengths: Tensor, chain: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Continue chains with what followed the last occurrence of their last tokens.

    A match that reaches the chain's own end is taken to repeat from its start.

    Args:
        text: `[B, L + U]`; `text[b, lengths[b]]`, `lengths` `[B]` < L, is the row's last token.
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
    """Load `long:N:DRAFTER`; raise `LoadError` if the name is invalid, or the drafter cannot be loaded."""
    number, _, name = rest.partition(":")
    if not (number.isdecimal() and int(number) > 0 and name):
        raise LoadError(f"drafter 'long:{rest}': use long:N:DRAFTER, such as long:15:ngram")
    return LongChainDrafter(loading.load(name), int(number))

"""`fly`: accepts a mismatch where the target model is uncertain and agrees with the draft tokens after it.

Li et al. 2025, *Training-Free Loosely Speculative Decoding* (FLy, arXiv 2511.22972).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, Verified, Verifier
from drafter.acceptance.lenient import leading_entropy, lenient_walk, node_views
from drafter.errors import RequestError
from drafter.requests import SamplingParams
from drafter.tree.token_tree import TokenTree


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
        """Refuse requests that sample."""
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
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)


def _goes_on(tree: TokenTree, exact: Tensor, window: int, depth: int) -> Tensor:
    """Return which nodes `[B, N]` have a path of `window` draft nodes below, all but the last `exact` `[B, N]`.

    Exact nodes carry the target model's choice at their parents. The tree has at most `depth` levels.
    """
    is_draft = tree.tokens >= 0
    is_draft[:, 0].fill_(False)
    # From the end: after k rounds, whether a node has a valid path of k nodes below it.
    follows = torch.ones_like(is_draft)
    for place in range(min(window, depth + 1)):  # no path below a node is longer than `depth`
        good = is_draft & follows & (exact if place else is_draft)
        follows = torch.zeros_like(tree.tokens).scatter_reduce(1, tree.parents, good.long(), "amax") > 0
    return follows

"""`fly`: a mismatch is let pass where the base is uncertain and goes on from it as if nothing had happened.

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
    """Accepts a mismatch if the base's entropy there is at least θ and the next W - 1 drafts are the base's choices.

    The base's entropy is that of its three most probable tokens. As in the authors' code, one draft more must follow
    on the window: a mismatch in the last W places of a chain is rejected. On a tree this holds of some path below the
    mismatch. Greedy rows only, as published.

    Args:
        theta: θ in nats. With infinity nothing is let pass.
        window: W, draft tokens from the mismatch on that decide.

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
        """θ and W."""
        return {"theta": self._theta, "window": self._window}

    def refuse(self, sampling: SamplingParams) -> None:
        """Refuse a request that draws its tokens."""
        if (temperature := sampling.over().temperature) > 0:
            raise RequestError(
                f"the verifier fly decodes greedily, and temperature is {temperature:g}: "
                "set it to 0, or use the verifier exact or typical"
            )

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """Walk down each tree; see `Verifier.accept`."""
        tree = verified.tree
        views = node_views(verified, sampling, leading_entropy)
        exact = tree.tokens == views.choices.gather(1, tree.parents)
        uncertain = views.entropy.gather(1, tree.parents) >= self._theta
        lenient = uncertain & _goes_on(tree, exact, self._window, verified.depth)
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)


def _goes_on(tree: TokenTree, exact: Tensor, window: int, depth: int) -> Tensor:
    """Whether a path of `window` draft nodes goes on from each node, of which all but the last are exact, `[B, N]`.

    Args:
        tree: `[B, N]`.
        exact: `[B, N]` bool: nodes that carry the base's choice at their parents.
        window: W.
        depth: No node lies deeper below the root.
    """
    is_draft = tree.tokens >= 0
    is_draft[:, 0].fill_(False)
    # From the end: after k rounds, whether a path of k nodes below a node is as it must be.
    follows = torch.ones_like(is_draft)
    for place in range(min(window, depth + 1)):  # no path below a node is longer than `depth`
        good = is_draft & follows & (exact if place else is_draft)
        follows = torch.zeros_like(tree.tokens).scatter_reduce(1, tree.parents, good.long(), "amax") > 0
    return follows

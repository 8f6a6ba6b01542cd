"""`typical`: accepts draft tokens that are likely enough under the target model (typical acceptance).

Cai et al. 2024, *Medusa* (arXiv 2401.10774), section 2.3.2, after Hewitt et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, Verified, Verifier
from drafter.acceptance.lenient import lenient_walk, node_views, shannon_entropy


class TypicalVerifier(Verifier):
    """Accepts a draft token x where `p(x) > min(ε, δ · exp(−H))`; H is the entropy of the target distribution p.

    p is the distribution that a row samples from, after biases, penalties, temperature and filters, so forbidden tokens
    are never accepted. A row of temperature 0 is decoded exactly, as published. On a tree see `lenient_walk`.

    Args:
        epsilon: ε. With ε = 1 and an infinite δ only the target model's choices are accepted.
        delta: δ.

    Raises:
        ValueError: ε is not between 0 and 1, or δ is negative.
    """

    name = "typical"
    lossless = False

    def __init__(self, epsilon: float = 0.3, delta: float = 0.09) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must be between 0 and 1, not {epsilon:g}")
        if not delta >= 0:
            raise ValueError(f"delta must be at least 0, not {delta:g}")
        self._epsilon, self._delta = epsilon, delta

    @property
    def settings(self) -> Mapping[str, float]:
        return {"epsilon": self._epsilon, "delta": self._delta}

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        tree = verified.tree
        views = node_views(verified, sampling, shannon_entropy)
        threshold = (self._delta * torch.exp(-views.entropy)).clamp_max(self._epsilon)
        drawn = (sampling.table.temperature[sampling.rows] > 0)[:, None]
        lenient = drawn & (views.log_probs.exp() > threshold.gather(1, tree.parents))
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)

"""`pad`: rejects a draft token only if a classifier predicts that it would make the answer worse.

Ziashahabi et al. 2025, *Reject Only Critical Tokens: Pivot-Aware Speculative Decoding* (PAD, arXiv 2511.00351).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from drafter.acceptance.choices import RowSampling, SamplingMode
from drafter.acceptance.contract import Accepted, ExactVerifier, Verified, Verifier
from drafter.acceptance.lenient import lenient_walk, node_views, shannon_entropy
from drafter.errors import LoadError
from drafter.methods.pad.classifier import PivotFeatures, load_classifier
from drafter.requests import SamplingParams
from drafter.target.model import BaseModel

_LOG_FLOOR = math.log(1e-4)
"""Tokens with a probability below 10⁻⁴ are always rejected."""
_PLAIN = SamplingMode.of([SamplingParams()])


class PadVerifier(Verifier):
    """Accepts a draft token x that the target model would not choose if P(pivot) ≤ σ and p(x) ≥ 10⁻⁴.

    The classifier reads the target model's own distribution, on which it was trained. The floor applies to the
    distribution that the row samples from, so tokens that its settings forbid are never accepted. The paper applies it
    to exactly accepted tokens, too, but rejecting these would choose them again. On a tree see `lenient_walk`.

    Args:
        classifier: Folder of a classifier, made by `jobs.pivots` for the target model.
        sigma: σ. With 0 only the target model's choices are accepted.

    Raises:
        ValueError: σ is not between 0 and 1.
        LoadError: There is no classifier, or it is damaged.
    """

    name = "pad"
    lossless = False

    def __init__(self, classifier: str | Path | None = None, sigma: float = 0.5) -> None:
        if not 0 <= sigma <= 1:
            raise ValueError(f"sigma must be between 0 and 1, not {sigma:g}")
        if classifier is None:
            raise LoadError(
                "the verifier pad needs a classifier: make one with python -m jobs.pivots, and give its folder as "
                "verifier.classifier"
            )
        self._folder, self._sigma = str(classifier), sigma
        self._log_sigma = math.log(sigma) if sigma > 0 else -math.inf
        self._classifier, self._base = load_classifier(classifier)
        self.hidden_layers = (self._classifier.layer,)

    @property
    def settings(self) -> Mapping[str, float]:
        return {"sigma": self._sigma}

    def open(self, base: BaseModel) -> None:
        """Check the classifier's target model and move it to the device; see `Verifier.open`."""
        if not base.has_fingerprint(self._base.fingerprint):
            raise LoadError(
                f"classifier {self._folder!r} was made for another target model: for {self._base.name} "
                f"({self._base.fingerprint}), not for {base.name} ({base.fingerprint}): make one for this model with "
                "python -m jobs.pivots"
            )
        self._classifier.to(base.device)

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        if verified.read is None or verified.tree.size == 1:
            return ExactVerifier().accept(verified, sampling)
        tree, plain = verified.tree, sampling.mode.likeliest
        own = node_views(verified, replace(sampling, mode=_PLAIN), shannon_entropy)
        views = own if plain else node_views(verified, sampling, shannon_entropy)
        entropy = own.entropy.gather(1, tree.parents)
        harmless = self._log_pivot(verified.read, entropy, own.log_probs.exp()) <= self._log_sigma
        lenient = harmless & (views.log_probs >= _LOG_FLOOR)
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)

    def _log_pivot(self, hidden: Tensor, entropy: Tensor, probability: Tensor) -> Tensor:
        """Return log P(pivot) `[B, N]` of the nodes."""
        return self._classifier.log_pivot(PivotFeatures(hidden, entropy, probability))

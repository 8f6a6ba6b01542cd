"""Pivots, told by what they do to answers; a classifier that learns to tell them from afar; how well it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.verifiers.lenient.pivot_classifier import PivotClassifier, PivotFeatures

_SHARE = 0.9
_EPOCHS, _BATCH = 60, 128
_RATE, _DECAY = 1e-3, 1e-2


def is_pivot(with_it: float, without: float) -> bool:
    """Whether a token makes answers worse: their mean utility with it is below 0.9 of that without, as in PAD.

    Args:
        with_it: Mean utility of answers with it, at least 0: a share of less than nothing means nothing.
        without: The same of those without.
    """
    return with_it < _SHARE * without


def train_classifier(
    features: PivotFeatures, pivots: Tensor, layer: int, *, seed: int = 0, epochs: int = _EPOCHS
) -> PivotClassifier:
    """Train a classifier by cross-entropy with AdamW, the same each time.

    Args:
        features: Of R labelled tokens, R of at least 2; hidden states `[R, d]`.
        pivots: `[R]` bool.
        layer: The base's layer whose outputs the hidden states are.
        seed: Of the first weights and of the order of tokens.
        epochs: Passes over the tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = PivotClassifier(features.hidden.shape[-1], layer)
        classifier.standardise(features)
        optimiser = torch.optim.AdamW(classifier.parameters(), lr=_RATE, weight_decay=_DECAY)
        for _ in range(epochs):
            for some in torch.randperm(len(pivots)).split(_BATCH):
                part = PivotFeatures(features.hidden[some], features.entropy[some], features.probability[some])
                loss = F.cross_entropy(classifier(part), pivots[some].long())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return classifier.eval().requires_grad_(False)


@dataclass(frozen=True)
class RocPoint:
    """What a threshold does.

    Args:
        threshold: Tokens with a larger P(pivot) are taken for pivots.
        false_positives: Share of harmless tokens that are.
        true_positives: Share of pivots that are.
    """

    threshold: float
    false_positives: float
    true_positives: float


@dataclass(frozen=True)
class Roc:
    """A receiver operating characteristic.

    Args:
        points: From the largest threshold, at which nothing is a pivot, to 0.
        area: Under the curve: how often a pivot has a larger probability than a harmless token has.
    """

    points: list[RocPoint]
    area: float


def roc(probabilities: Sequence[float], pivots: Sequence[bool]) -> Roc | None:
    """Return the ROC of a classifier; None where all tokens are alike.

    Args:
        probabilities: P(pivot) of each token.
        pivots: Whether it is one.
    """
    positives = sum(pivots)
    negatives = len(pivots) - positives
    if not positives or not negatives:
        return None
    ordered = sorted(zip(probabilities, pivots, strict=True), reverse=True)
    points, area, found, wrong = [RocPoint(1.0, 0.0, 0.0)], 0.0, 0, 0
    for _, group in groupby(ordered, key=lambda one: one[0]):
        here = [pivot for _, pivot in group]
        right = sum(here)
        # Pivots above each harmless token count whole, those of the same probability by half.
        area += (len(here) - right) * (found + right / 2)
        found, wrong = found + right, wrong + len(here) - right
        below = ordered[found + wrong][0] if found + wrong < len(ordered) else 0.0
        points.append(RocPoint(below, wrong / negatives, found / positives))
    return Roc(points, area / (positives * negatives))

"""Rejected draft tokens, noted while the base decodes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, Verified
from drafter.acceptance.exact import ExactVerifier
from drafter.acceptance.lenient import shannon_entropy
from drafter.methods.pad.classifier import PivotClassifier, PivotFeatures


@dataclass(frozen=True)
class Rejection:
    """A draft token that was rejected.

    Args:
        prefix: Prompt and output before it.
        prompt_tokens: How many of these are the prompt's.
        rejected: The token.
        chosen: The base's own choice in its place.
        entropy: Of the base's distribution there, in nats.
        probability: p(x) of the rejected token by that distribution.
        hidden: `[d]` fp32, on the host: the base's hidden state of the rejected token.
    """

    prefix: list[int]
    prompt_tokens: int
    rejected: int
    chosen: int
    entropy: float
    probability: float
    hidden: Tensor


class RecordingVerifier(ExactVerifier):
    """The exact verifier, which notes at each step the token that is rejected where the accepted path ends.

    Of several children there, it is the first: the one that the drafter finds most probable. To note it is to wait for
    the device, so that steps are no CUDA graphs. Slots that are empty or not sound are noted as well: a caller keeps
    what continues a text that it knows.

    Args:
        layer: The base's layer whose output is noted, counted from 0.
    """

    def __init__(self, layer: int) -> None:
        self.hidden_layers = (layer,)
        self._noted: list[Rejection] = []

    def take(self) -> list[Rejection]:
        """Return what has been noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """Accept exactly; see `Verifier.accept`."""
        accepted = super().accept(verified, sampling)
        if verified.read is not None and verified.tree.size > 1:
            self._note(verified, verified.read, sampling, accepted)
        return accepted

    def _note(self, verified: Verified, read: Tensor, sampling: RowSampling, accepted: Accepted) -> None:
        tree, count = verified.tree, accepted.count[:, None]
        last, chosen = accepted.path.gather(1, count), accepted.tokens.gather(1, count)[:, 0]
        rows = torch.arange(len(count), device=count.device)
        first = tree.first_children().gather(1, last)[:, 0]
        child = first.clamp_max(tree.size - 1)
        tokens = tree.tokens[rows, child].clamp_min(0)
        log_probs = verified.logits[rows, last[:, 0]].double().log_softmax(-1)
        entropy, probability = shannon_entropy(log_probs), log_probs.gather(1, tokens[:, None])[:, 0].exp()
        hidden, texts = read[rows, child].float().cpu(), sampling.tokens.cpu()
        prompts = sampling.table.prompt_lengths[sampling.rows]
        numbers = (first, tokens, chosen, accepted.count, sampling.lengths, prompts, entropy, probability)
        for row, (node, token, choice, drafts, length, prompt, uncertain, likely) in enumerate(
            zip(*(one.tolist() for one in numbers), strict=True)
        ):
            if node < tree.size:
                path = accepted.tokens[row, :drafts].tolist()
                prefix = [*texts[row, : length + 1].tolist(), *path]
                self._noted.append(Rejection(prefix, prompt, token, choice, uncertain, likely, hidden[row].clone()))


# ---- Pivots, told by what they do to answers; a classifier that learns to tell them from afar; how well it does.

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

"""Training of PAD's classifier: rejected draft tokens, labels by answer quality, and the area under the ROC curve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, ExactVerifier, Verified
from drafter.acceptance.lenient import shannon_entropy
from drafter.methods.pad.method import PivotClassifier, PivotFeatures


@dataclass(frozen=True)
class Rejection:
    """A rejected draft token after `prefix`, and the target model's `chosen` one instead; see `PivotFeatures`.

    `hidden` is `[d]` fp32, on the host. The prefix begins with a prompt of `prompt_tokens`.
    """

    prefix: list[int]
    prompt_tokens: int
    rejected: int
    chosen: int
    entropy: float
    probability: float
    hidden: Tensor


class RecordingVerifier(ExactVerifier):
    """The exact verifier, which records the token rejected at the end of each accepted path.

    Of several children there it records the first, the drafter's likeliest. Recording syncs with the device, so steps
    are no CUDA graphs. Empty and unsound slots are recorded too: callers must keep only what continues a known text.
    `layer` is that of the target model whose output is recorded, counted from 0.
    """

    def __init__(self, layer: int) -> None:
        self.hidden_layers = (layer,)
        self._noted: list[Rejection] = []

    def take(self) -> list[Rejection]:
        noted, self._noted = self._noted, []
        return noted

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
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
        _, log_probs = verified.choices(sampling).own(rows, last[:, 0])
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


_SHARE = 0.9
_EPOCHS, _BATCH = 60, 128
_RATE, _DECAY = 1e-3, 1e-2


def is_pivot(with_it: float, without: float) -> bool:
    """Return whether answers with the token have a mean utility below 0.9 of those without it, as in PAD."""
    return with_it < _SHARE * without


def train_classifier(features: PivotFeatures, pivots: Tensor, *, epochs: int = _EPOCHS) -> PivotClassifier:
    """Train a classifier by cross-entropy with AdamW, deterministically, on R ≥ 2 tokens; `pivots` are `[R]` bool."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = PivotClassifier(features.hidden.shape[-1])
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


def roc_area(scores: Tensor, pivots: Tensor) -> float | None:
    """Return the area under the ROC of scores `[R]` against labels `[R]` bool; None where all labels are the same.

    That is how often a pivot is above a harmless token, a tie counting half (Mann and Whitney).
    """
    above, below = scores[pivots], scores[~pivots].sort().values
    if not len(above) or not len(below):
        return None
    first, last = (torch.searchsorted(below, above, right=right).double() for right in (False, True))
    return float((first + last).mean()) / (2 * len(below))

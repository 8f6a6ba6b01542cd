"""PAD: rejects a draft token only if a classifier predicts that it is a *pivot*, one that would make the answer worse.

Ziashahabi et al. 2025, *Reject Only Critical Tokens: Pivot-Aware Speculative Decoding* (arXiv 2511.00351). Widths are
the published ones. Our choices: the hidden state is the draft token's own, inputs are standardised over the labelled
tokens, and layers are joined by ReLU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, ExactVerifier, Verified, Verifier
from drafter.acceptance.lenient import lenient_walk, node_views, shannon_entropy
from drafter.errors import LoadError, first_line
from drafter.heads.config import CONFIG_FILE, WEIGHTS_FILE, write_whole
from drafter.target_model.model import BaseModel

_HIDDEN, _SCALARS, _JOINED = 64, 8, 128
_PIVOT = 1
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class PivotFeatures:
    """Inputs for draft tokens, of any shape `[...]`."""

    hidden: Tensor  # `[..., d]` the target model's hidden state of the draft token itself, at the classifier's layer
    entropy: Tensor  # `[...]` of the target model's distribution there, in nats
    probability: Tensor  # `[...]` of the token

    @property
    def values(self) -> Tensor:
        """`[..., d + 2]` fp32."""
        scalars = torch.stack([self.entropy, self.probability], -1)
        return torch.cat([self.hidden.float(), scalars.float()], -1)


class PivotClassifier(nn.Module):
    """Two linear layers, for the hidden state and for both numbers, and two more for both together."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.of_hidden = nn.Linear(hidden_size, _HIDDEN)
        self.of_scalars = nn.Linear(2, _SCALARS)
        self.joined = nn.Linear(_HIDDEN + _SCALARS, _JOINED)
        self.out = nn.Linear(_JOINED, 2)
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(hidden_size + 2))
        self.register_buffer("deviation", torch.ones(hidden_size + 2))

    def standardise(self, features: PivotFeatures) -> None:
        """Scale inputs like `features` `[R]`, R ≥ 2, to mean 0 and deviation 1."""
        values = features.values
        self.mean.copy_(values.mean(0))
        self.deviation.copy_(values.std(0).clamp_min(_LEAST_DEVIATION))

    def forward(self, features: PivotFeatures) -> Tensor:
        """Return logits `[..., 2]` fp32: of a harmless token, and of a pivot."""
        values = (features.values - self.mean) / self.deviation
        hidden, scalars = values.split([self.hidden_size, 2], -1)
        both = torch.cat([F.relu(self.of_hidden(hidden)), F.relu(self.of_scalars(scalars))], -1)
        logits: Tensor = self.out(F.relu(self.joined(both)))
        return logits

    def log_pivot(self, features: PivotFeatures) -> Tensor:
        """Return log P(pivot) `[...]`; never -inf, so a threshold of 0 is never met."""
        return self.forward(features).log_softmax(-1)[..., _PIVOT]


_FORMAT, _KIND = 1, "pad"


@dataclass(frozen=True)
class BaseOfClassifier:
    """The target model of a classifier, which reads the output of its `layer`, counted from 0."""

    name: str
    fingerprint: str
    layer: int


def save_classifier(
    classifier: PivotClassifier, base: BaseOfClassifier, training: Mapping[str, Any], folder: Path
) -> None:
    """Write a classifier's folder; the configuration last, so a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in classifier.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {
        "format_version": _FORMAT,
        "verifier": _KIND,
        "base_model": {"name": base.name, "fingerprint": base.fingerprint},
        "hidden_size": classifier.hidden_size,
        "layer": base.layer,
        "training": dict(training),
    }
    text = json.dumps(config, indent=2) + "\n"
    write_whole(folder / CONFIG_FILE, lambda file: file.write_text(text, encoding="utf-8"))


def load_classifier(name: str | Path) -> tuple[PivotClassifier, BaseOfClassifier]:
    """Read a classifier's folder, and its target model; raise `LoadError` if there is none, or it is damaged."""
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise LoadError(
            f"classifier {str(name)!r} is not a folder with {CONFIG_FILE} and {WEIGHTS_FILE}: make one with "
            "python -m recipes.pad"
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if (config["format_version"], config["verifier"]) != (_FORMAT, _KIND):
            raise LoadError(f"classifier {str(name)!r} is not one of recipes.pad of this release")
        named, layer = config["base_model"], int(config["layer"])
        base = BaseOfClassifier(str(named["name"]), str(named["fingerprint"]), layer)
        with torch.device("cpu"):
            classifier = PivotClassifier(int(config["hidden_size"]))
        classifier.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except LoadError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise LoadError(f"classifier {str(name)!r} is damaged: {why}; run python -m recipes.pad again") from error
    return classifier.eval().requires_grad_(False), base


_LOG_FLOOR = math.log(1e-4)  # tokens with a probability below 10⁻⁴ are always rejected


class PadVerifier(Verifier):
    """Accepts a draft token x that the target model would not choose if P(pivot) ≤ σ and p(x) ≥ 10⁻⁴.

    The classifier reads the target model's own distribution, on which it was trained. The floor applies to the
    distribution that the row samples from, so tokens that its settings forbid are never accepted. The paper applies it
    to exactly accepted tokens, too, but rejecting these would choose them again. On a tree see `lenient_walk`.

    Raises `ValueError` if σ is not between 0 and 1, and `LoadError` if there is no classifier, or it is damaged.
    """

    name = "pad"
    lossless = False

    def __init__(self, classifier: str | Path | None = None, sigma: float = 0.5) -> None:
        if not 0 <= sigma <= 1:
            raise ValueError(f"sigma must be between 0 and 1, not {sigma:g}")
        if classifier is None:
            raise LoadError(
                "the verifier pad needs a classifier: make one with python -m recipes.pad, and give its folder as "
                "verifier.classifier"
            )
        self._folder, self._sigma = str(classifier), sigma
        self._log_sigma = math.log(sigma) if sigma > 0 else -math.inf
        self._classifier, self._base = load_classifier(classifier)
        self.hidden_layers = (self._base.layer,)

    @property
    def settings(self) -> Mapping[str, float]:
        return {"sigma": self._sigma}

    def open(self, base: BaseModel) -> None:
        if self._base.fingerprint != base.fingerprint:
            raise LoadError(
                f"classifier {self._folder!r} was made for another target model: for {self._base.name} "
                f"({self._base.fingerprint}), not for {base.name} ({base.fingerprint}): make one for this model with "
                "python -m recipes.pad"
            )
        self._classifier.to(base.device)

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        if verified.read is None or verified.tree.size == 1:
            return ExactVerifier().accept(verified, sampling)
        tree, views = verified.tree, node_views(verified, sampling, shannon_entropy)
        plain = verified.choices(sampling).plain
        own = views if plain else node_views(verified, sampling, shannon_entropy, own=True)
        entropy = own.entropy.gather(1, tree.parents)
        features = PivotFeatures(verified.read, entropy, own.log_probs.exp())
        harmless = self._classifier.log_pivot(features) <= self._log_sigma
        lenient = harmless & (views.log_probs >= _LOG_FLOOR)
        return lenient_walk(tree, views.choices, lenient, views.log_probs, verified.depth)

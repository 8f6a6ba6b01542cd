"""The classifier of `pad`: the probability that a draft token is a pivot, one that would make the answer worse.

Ziashahabi et al. 2025, *Reject Only Critical Tokens: Pivot-Aware Speculative Decoding* (PAD, arXiv 2511.00351). Widths
are the published ones. Our choices: the hidden state is the draft token's own, inputs are standardised over the
labelled tokens, and layers are joined by ReLU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.errors import LoadError, first_line

_HIDDEN, _SCALARS, _JOINED = 64, 8, 128
_LAYERS_FROM_END = 8
_PIVOT = 1
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class PivotFeatures:
    """Inputs for draft tokens, of any shape `[...]`.

    Args:
        hidden: `[..., d]` the target model's hidden state of the draft token itself, at the classifier's layer.
        entropy: `[...]` of the target model's distribution at the token's position, in nats.
        probability: `[...]` p(x) of the token by that distribution.
    """

    hidden: Tensor
    entropy: Tensor
    probability: Tensor

    @property
    def scalars(self) -> Tensor:
        """`[..., 2]` fp32."""
        return torch.stack([self.entropy, self.probability], -1).float()


class PivotClassifier(nn.Module):
    """Two linear layers, for the hidden state and for both numbers, and two more for both together.

    It reads the output of the target model's `layer`, counted from 0.
    """

    def __init__(self, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.hidden_size, self.layer = hidden_size, layer
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
        values = torch.cat([features.hidden.float(), features.scalars], -1)
        self.mean.copy_(values.mean(0))
        self.deviation.copy_(values.std(0).clamp_min(_LEAST_DEVIATION))

    def forward(self, features: PivotFeatures) -> Tensor:
        """Return logits `[..., 2]` fp32: of a harmless token, and of a pivot."""
        values = torch.cat([features.hidden.float(), features.scalars], -1)
        values = (values - self.mean) / self.deviation
        hidden, scalars = values.split([self.hidden_size, 2], -1)
        both = torch.cat([F.relu(self.of_hidden(hidden)), F.relu(self.of_scalars(scalars))], -1)
        logits: Tensor = self.out(F.relu(self.joined(both)))
        return logits

    def log_pivot(self, features: PivotFeatures) -> Tensor:
        """Return log P(pivot) `[...]`; never -inf, so a threshold of 0 is never met."""
        return self.forward(features).log_softmax(-1)[..., _PIVOT]


def published_layer(num_layers: int) -> int:
    """Return the layer to read: the eighth from the end, or the first of a model with fewer."""
    return max(num_layers - _LAYERS_FROM_END, 0)


CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_FORMAT = 1
_KIND = "pad"


@dataclass(frozen=True)
class BaseOfClassifier:
    """The target model of a classifier; see `drafter.target.architecture` for the fingerprint."""

    name: str
    fingerprint: str


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
        "layer": classifier.layer,
        "training": dict(training),
    }
    partial = folder / f"{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / CONFIG_FILE)


def load_classifier(name: str | Path) -> tuple[PivotClassifier, BaseOfClassifier]:
    """Read a classifier's folder, and its target model.

    Raises:
        LoadError: There is none, or it is damaged.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise LoadError(
            f"classifier {str(name)!r} is not a folder with {CONFIG_FILE} and {WEIGHTS_FILE}: make one with "
            "python -m jobs.pivots"
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if (config["format_version"], config["verifier"]) != (_FORMAT, _KIND):
            raise LoadError(f"classifier {str(name)!r} is not one of python -m jobs.pivots of this release")
        base = BaseOfClassifier(str(config["base_model"]["name"]), str(config["base_model"]["fingerprint"]))
        with torch.device("cpu"):
            classifier = PivotClassifier(int(config["hidden_size"]), int(config["layer"]))
        classifier.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except LoadError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise LoadError(
            f"classifier {str(name)!r} is damaged: {why}: make it again with python -m jobs.pivots"
        ) from error
    return classifier.eval().requires_grad_(False), base

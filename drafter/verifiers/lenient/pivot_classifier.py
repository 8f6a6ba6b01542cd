"""The classifier of `pad`: how likely a draft token is a pivot, one that would make the answer worse.

Ziashahabi et al. 2025, *Reject Only Critical Tokens: Pivot-Aware Speculative Decoding* (PAD, arXiv 2511.00351). Widths
are the published ones. Decided here is that the hidden state is that of the draft token itself, which knows what the
token is, that inputs are standardised by the mean and deviation of the labelled tokens, and that layers are joined by
ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_HIDDEN, _SCALARS, _JOINED = 64, 8, 128
_LAYERS_FROM_END = 8
_PIVOT = 1
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class PivotFeatures:
    """What is known of draft tokens, of any shape `[...]`.

    Args:
        hidden: `[..., d]` the base's hidden state of the draft token itself, at the classifier's layer.
        entropy: `[...]` of the base's distribution in the token's place, in nats.
        probability: `[...]` p(x) of the token by that distribution.
    """

    hidden: Tensor
    entropy: Tensor
    probability: Tensor

    @property
    def scalars(self) -> Tensor:
        """`[..., 2]` fp32: entropy and probability."""
        return torch.stack([self.entropy, self.probability], -1).float()


class PivotClassifier(nn.Module):
    """Two linear layers, one for the hidden state and one for both numbers, and two for what they say together.

    Args:
        hidden_size: d of the base.
        layer: The base's layer whose output it reads, counted from 0.
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
        """Let inputs like `features` `[R]`, R of at least 2, have mean 0 and deviation 1."""
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
        """Return log P(pivot) `[...]`. It is never -inf, so that no threshold of 0 is ever reached."""
        return self.forward(features).log_softmax(-1)[..., _PIVOT]


def published_layer(num_layers: int) -> int:
    """Return the layer that the classifier reads: the eighth from the end, or the first of a base with fewer."""
    return max(num_layers - _LAYERS_FROM_END, 0)

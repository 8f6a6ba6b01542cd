"""From several hidden states of the base to one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.heads.eagle3.eagle3_config import Eagle3HeadConfig


class Fusion(nn.Module):
    """A linear map of the states side by side, behind the norms that the configuration names."""

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__()
        width, count = config.hidden_size, len(config.hidden_layers)
        sizes = {"none": [], "whole": [count * width], "each": [width] * count}[config.fusion_norm]
        self.norms = nn.ModuleList(nn.RMSNorm(size, config.norm_eps) for size in sizes)
        self.linear = nn.Linear(count * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return states `[..., d]` of hidden states `[..., K · d]`."""
        if self.norms:
            parts = hidden.chunk(len(self.norms), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1)
        return self.linear(hidden)  # type: ignore[no-any-return]

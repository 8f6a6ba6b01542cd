"""Backend of the lattice search for an asynchronous device: every path is extended and every frame is asked.

Shapes and operations depend on the number of rows and on the settings alone. So the search can be recorded as a CUDA
graph, and the host never waits for a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.search.contract import LabelModel
from drafter.search.lattice_backend import Ask, Paths


@dataclass(frozen=True)
class OnDevice:
    """`Backend` that computes on tensors and leaves nothing out."""

    device: torch.device

    def array(self, tensor: Tensor) -> Tensor:
        return tensor

    def tensor(self, array: Tensor) -> Tensor:
        return array

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def minimum(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.minimum(first, second)

    def ask(self, model: LabelModel, band: range, paths: Paths) -> Ask:
        """Score all frames at once: few large kernels take less time than many small ones."""
        shares, blank = model.score(band.start, band.stop, paths.rows, paths.state)
        return lambda frame, arrived: (shares[:, frame - band.start], blank[:, frame - band.start])

    def by_row(self, scores: Tensor, paths: Paths, batch: int) -> tuple[Tensor, Tensor]:
        return scores.unflatten(0, (batch, -1)), self.arange(len(scores))

    def promising(self, probs: Sequence[Tensor], size: int) -> slice:
        return slice(None)

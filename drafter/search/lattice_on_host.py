"""Backend of the lattice search for a CPU: it computes only what may still matter to the tree.

The label model runs in PyTorch. Around it the search does dozens of operations a level on a few small arrays. There the
time to call an operation counts, and numpy takes less of it than PyTorch. benchmarks/results/searches has the gain over
`OnDevice` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.search.contract import LabelModel
from drafter.search.lattice_backend import Ask, Paths

_Floats = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OnHost:
    """`Backend` that computes on numpy arrays and leaves out what is improbable or cannot be in the tree.

    Args:
        least: Paths of no higher prefix probability are not extended. Frames after the first of a band are not asked
            about paths that reach them with no more mass than this.
    """

    least: float

    def array(self, tensor: Tensor) -> npt.NDArray[np.generic]:
        return tensor.numpy()

    def tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array)

    def arange(self, count: int) -> _Ids:
        return np.arange(count)

    def minimum(self, first: _Floats, second: _Floats) -> _Floats:
        return np.minimum(first, second)

    def ask(self, model: LabelModel, band: range, paths: Paths) -> Ask:
        """Score one frame at a time, and only after paths that reach it."""
        rows = torch.from_numpy(paths.rows)

        def ask(frame: int, reached: _Floats) -> tuple[Tensor, _Floats] | None:
            asked = None if frame == band.start else (reached > self.least).nonzero()[0]
            if asked is None or len(asked) == len(reached):
                shares, blank = model.score(frame, frame + 1, rows, paths.state)
                return shares[:, 0], blank[:, 0].numpy()
            if not len(asked) and frame == band[-1]:
                return None
            which = torch.from_numpy(asked)
            shares, blank = model.score(frame, frame + 1, rows[which], paths.state[which])
            every_share = shares.new_zeros(len(reached), shares.shape[2]).index_copy_(0, which, shares[:, 0])
            every_blank = np.zeros(len(reached), dtype=np.float32)
            every_blank[asked] = blank[:, 0].numpy()
            return every_share, every_blank

        return ask

    def by_row(self, scores: _Floats, paths: Paths, batch: int) -> tuple[Tensor, _Ids]:
        path = np.arange(len(paths.rows))
        if batch == 1:
            return torch.from_numpy(scores)[None], path
        place = paths.rows * paths.width + paths.places
        by_row = np.zeros((batch * paths.width, scores.shape[1]), dtype=np.float32)
        by_row[place] = scores
        path_at = np.zeros(batch * paths.width, dtype=np.int64)
        path_at[place] = path
        return torch.from_numpy(by_row).view(batch, paths.width, -1), path_at

    def promising(self, probs: Sequence[_Floats], size: int) -> _Ids | None:
        """Choose the nodes in the best tree of all candidates so far: no other node can have a child in the tree."""
        last = probs[-1]
        wanted = last > self.least
        found = np.concatenate(probs, 1)
        if (beyond := found.shape[1] - (size - 1)) >= 0:
            wanted &= last > np.partition(found, beyond, axis=1)[:, beyond, None]
        chosen = wanted.ravel().nonzero()[0]
        return chosen if len(chosen) else None

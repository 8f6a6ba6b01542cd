"""Forwards over trees, or prompts, of different sizes without padding: the nodes of all rows follow one another as one.

Everything in a transformer but attention treats each token by itself. Only attention needs to know which row a node
belongs to: there (`tree_attention`) the queries are laid out by rows again, beside their rows' keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter import devices


@dataclass(frozen=True)
class Packing:
    """Index of the nodes of `[B, N]` that are not padding.

    Args:
        nodes: `[M]` those that are there, row after row, as places in the flattened `[B * N]`.
        places: `[B, N]` where among the M each node is; anything valid for one that is not there.
    """

    nodes: Tensor
    places: Tensor

    @staticmethod
    def of(real: Tensor) -> Packing:
        """Of the nodes that are `real` `[B, N]` bool. Waits for the device."""
        places = (real.flatten().cumsum(0) - 1).clamp_min(0)
        return Packing(real.flatten().nonzero()[:, 0], places.view_as(real))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> Packing:
        """Of the first `counts` `[B]` nodes of each row, where the widest row has no padding."""
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        packing = Packing.of(real)
        return Packing(devices.send(packing.nodes, device), devices.send(packing.places, device))

    def pack(self, values: Tensor) -> Tensor:
        """Pack `[B, N, ...]` to `[1, M, ...]`."""
        return values.flatten(0, 1).index_select(0, self.nodes)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack `[1, M, ...]` to `[B, N, ...]`; padding is undefined."""
        return packed[0].index_select(0, self.places.flatten()).unflatten(0, self.places.shape)  # type: ignore[no-any-return]

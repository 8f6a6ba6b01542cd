"""Forwards over trees, or prompts, of different sizes without padding: the nodes of all rows follow one another as one.

Everything in a transformer but attention treats each token by itself. Only attention needs to know which row a node
belongs to: there the queries are laid out by rows again, beside their rows' keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafter import devices

PACKED_ATTENTION = "packed_sdpa"
"""Name of `packed_attention` in transformers."""


@dataclass(frozen=True)
class Packing:
    """Which nodes of `[B, N]` there are, and where.

    Args:
        nodes: `[M]` those that are there, row after row, as places in the flattened `[B * N]`.
        places: `[B, N]` where among the M each node is; anything valid for one that is not there.
    """

    nodes: Tensor
    places: Tensor

    @staticmethod
    def of(real: Tensor) -> Packing:
        """Of the nodes that are `real` `[B, N]` bool. Waits for the device."""
        places = real.flatten().cumsum(0) - 1
        return Packing(real.flatten().nonzero()[:, 0], places.view_as(real))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> Packing:
        """Of the first `counts` `[B]` nodes of each row, where the widest row has no padding."""
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        packing = Packing.of(real)
        return Packing(devices.send(packing.nodes, device), devices.send(packing.places, device))

    def pack(self, values: Tensor) -> Tensor:
        """`[1, M, ...]` of `[B, N, ...]`."""
        return values.flatten(0, 1).index_select(0, self.nodes)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """`[B, N, ...]` of `[1, M, ...]`; what is in nodes that are not there means nothing."""
        return packed[0].index_select(0, self.places.flatten()).unflatten(0, self.places.shape)  # type: ignore[no-any-return]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, for packed queries where a `packing` is given.

    Args:
        module: The layer.
        query: `[1, H, M, D]`.
        key: `[B, H', S, D]`.
        value: `[B, H', S, D]`.
        attention_mask: `[B, 1, N, S]`.
        packing: Of the queries; without one they are `[B, H, N, D]`.
        settings: As for `sdpa`.

    Returns:
        `[1, M, H, D]`, and no weights.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    by_row = packing.unpack(query.transpose(1, 2)).transpose(1, 2)
    mixed, _ = sdpa_attention_forward(module, by_row, key, value, attention_mask, **settings)
    return packing.pack(mixed), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)

"""What a draft head borrows of its base: the token embedding and the LM head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.base_model import BaseModel


class Lender(Protocol):
    """A base, as a head that drafts for it sees it."""

    @property
    def device(self) -> torch.device:
        """Where tokens and hidden states are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of embeddings and logits."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Frozen token embeddings `[..., d]` of `tokens` `[...]`."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of `hidden` `[..., d]`."""


def draft_dtype(base: BaseModel) -> torch.dtype:
    """What to draft in: the base's dtype, but bf16 on a CPU with matrix units for it, where it is several times faster.

    A draft is a guess, so its rounding changes no output.
    """
    if base.device.type == "cpu" and base.dtype == torch.float32 and torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return base.dtype


def lend(base: BaseModel, dtype: torch.dtype) -> Lender:
    """`base` itself, or its embedding and LM head in another dtype."""
    return base if dtype == base.dtype else _Converted(base, dtype)


class _Converted:
    """A copy of the LM head in another dtype, and the base's embeddings converted as they come."""

    def __init__(self, base: BaseModel, dtype: torch.dtype) -> None:
        self.device, self.dtype = base.device, dtype
        self._base = base
        self._weight = base.lm_head_weight.to(dtype)
        bias = base.lm_head_bias
        self._bias: Tensor | None = None if bias is None else bias.to(dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._base.embed(tokens).to(self.dtype)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)

"""Rotary positions of attention heads (Su et al. 2021, arXiv 2104.09864), halves of a head paired as in Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALINGS = ("default", "linear", "llama3")
"""Kinds of scaled frequencies that `scaled_rates` knows, by the names of transformers' configurations."""


def rotary_rates(theta: float, size: int, device: torch.device) -> Tensor:
    """Return the angles a position turns by, `[size / 2]` float64, of heads of `size` numbers."""
    half = size // 2
    return theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)


def scaled_rates(rates: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return rates as a configuration's `rope_scaling` changes them.

    Args:
        rates: `[D / 2]`.
        scaling: Has `rope_type` (or `type`), one of `SCALINGS`, and the numbers that it needs.

    Raises:
        ValueError: The kind is unknown, or a number is missing.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        match kind:
            case "default":
                return rates
            case "linear":
                return rates / float(scaling["factor"])
            case "llama3":
                return _llama3(rates, scaling)
    except KeyError as error:
        raise ValueError(f"rope_scaling {kind!r} needs {error.args[0]!r}") from error
    raise ValueError(f"rope_scaling {kind!r} is not known: known are {', '.join(SCALINGS)}")


def _llama3(rates: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow rates are divided by the factor, fast ones stay, and those between are mixed (Llama 3.1)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * rates / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * rates + (1.0 - kept) * rates / float(scaling["factor"])


def rotation_table(rates: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return cosine and signed sine (first half negative) of positions `0..length-1`, `[length, 2, D]`."""
    angles = torch.arange(length, device=rates.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads to their positions.

    Args:
        heads: `[..., D]`.
        cos: Broadcastable to it.
        sin: Broadcastable to it, the first half negative.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)

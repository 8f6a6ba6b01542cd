"""What tells one base from another, whatever precision it is loaded in."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

_SAMPLED = 4096
"""Numbers of the embedding that take part."""


def fingerprint(model: Any, embedding: Tensor, sizes: list[Any]) -> str:
    """16 hex digits of a model's shape, a sample of its embedding, and every norm and bias.

    They are rounded to bf16 and taken from tensors that quantisation leaves alone, so that a base has one fingerprint
    in whichever precision it is loaded.

    Args:
        model: Its parameters of one dimension take part.
        embedding: `[V, d]`.
        sizes: Whatever tells its shape.
    """
    digest = hashlib.sha256()
    digest.update(repr(sizes).encode())
    flat = embedding.flatten()
    # Clamped, because the last of these is rounded up where the embedding is large.
    places = torch.linspace(0, flat.numel() - 1, _SAMPLED).long().clamp_max(flat.numel() - 1)
    sample = flat[places.to(flat.device)]
    vectors = [p.detach().flatten() for _, p in sorted(model.named_parameters()) if p.dim() == 1]
    for tensor in [sample, *vectors]:
        digest.update(tensor.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]

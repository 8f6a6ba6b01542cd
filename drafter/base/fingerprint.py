"""What tells one base from another, whatever precision it is loaded in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SCHEME = "v2-"
"""Fingerprints begin with it. Those of the first scheme are 16 hex digits and nothing else."""
_SAMPLED = 1 << 14
"""Largest number of values of a tensor that take part."""
_TINY = 2.0**-16
"""Values below this count as zero: fp16 does not hold them as exactly as bf16 does."""
_SAMPLED_FIRST = 4096
"""Number of values of the embedding that take part in the first scheme."""


def fingerprint(model: nn.Module, sizes: Sequence[Any]) -> str:
    """Return `v2-` and 16 hex digits of a model's shape and of values of each of its tensors.

    All parameters and buffers that a checkpoint holds take part, in the order of the model's modules: all values of a
    small tensor, and values at even distances of a large one. They are rounded to bf16, so that a base has one
    fingerprint in fp32 and in bf16, and one that was saved in half precision also in fp16.

    Args:
        model: The model.
        sizes: Values that tell its shape.
    """
    digest = hashlib.sha256(repr(list(sizes)).encode())
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):  # quantised layers may add what is none
            digest.update(repr(list(tensor.shape)).encode())
            digest.update(_bytes(_sample(tensor)))
    return _SCHEME + digest.hexdigest()[:16]


def is_of_first_scheme(given: str) -> bool:
    """Return whether a fingerprint is of the first scheme; see `first_fingerprint`."""
    return not given.startswith(_SCHEME)


def first_fingerprint(model: nn.Module, embedding: Tensor, sizes: Sequence[Any]) -> str:
    """Return a model's fingerprint of the first scheme, which draft heads and texts made by earlier releases name.

    It covers a sample of the embedding, and all norms and biases. So it does not see that other weights have changed.

    Args:
        model: The model.
        embedding: `[V, d]`.
        sizes: Values that tell the model's shape.
    """
    digest = hashlib.sha256(repr(list(sizes)).encode())
    flat = embedding.flatten()
    # Clamped, because the last of these is rounded up where the embedding is large.
    places = torch.linspace(0, flat.numel() - 1, _SAMPLED_FIRST, dtype=torch.float32).long().clamp_max(flat.numel() - 1)
    vectors = [p.detach().flatten() for _, p in sorted(model.named_parameters()) if p.dim() == 1]
    for tensor in [flat[places.to(flat.device)], *vectors]:
        digest.update(tensor.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(tensor: Tensor) -> Tensor:
    """Return up to `_SAMPLED` values of a tensor, the first and the last among them."""
    flat = tensor.detach().flatten()
    if len(flat) <= _SAMPLED:
        return flat
    places = torch.arange(_SAMPLED, device=flat.device) * (len(flat) - 1) // (_SAMPLED - 1)
    return flat[places]


def _bytes(values: Tensor) -> bytes:
    values = values.cpu()
    if values.is_floating_point():
        values = values.to(torch.bfloat16)
        values = values.masked_fill(values.abs() < _TINY, 0.0).view(torch.int16)
    return values.numpy().tobytes()

"""Matrices of a draft head's file as one byte a weight: an integer, and a scale for each row.

A draft head decides which tokens are proposed and never which are chosen, so that rounding its weights costs acceptance
at most, and no token. The step is a 127th of a row's largest weight.
"""

from __future__ import annotations

import torch

from drafter.heads.published import Weights

_SCALE = ".scale"
"""Ends the name of the scales `[rows]` of the matrix that is named before it."""
_LARGEST = 127
_FEWEST_ROWS = 16  # of a matrix that is worth it


def pack(tensors: Weights) -> Weights:
    """Return the tensors with each matrix of floats `[rows, columns]` as int8, and beside it its scales."""
    found: Weights = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2 and len(tensor) >= _FEWEST_ROWS:
            rows = tensor.float()
            scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
            found[name] = (rows / scale[:, None]).round().to(torch.int8)
            found[name + _SCALE] = scale
        else:
            found[name] = tensor
    return found


def unpack(tensors: Weights) -> Weights:
    """Return the tensors that `pack` was given, in float32 where it rounded them; others are left as they are.

    Raises:
        ValueError: A matrix of integers has no scales, or scales of other rows.
    """
    packed = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    found: Weights = {}
    for name, tensor in tensors.items():
        if name in packed:
            scale = tensors.get(name + _SCALE)
            if scale is None or scale.shape != tensor.shape[:1] or not scale.is_floating_point():
                raise ValueError(f"tensor {name!r} is of integers, and {name + _SCALE!r} does not have their scales")
            found[name] = tensor.float() * scale.float()[:, None]
        elif name.removesuffix(_SCALE) not in packed:
            found[name] = tensor
    return found

"""Weights of a head on their way between processes: checked, loaded, taken out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafter.errors import LoadError
from drafter.heads.contract import DraftHead


def weights_of(head: DraftHead) -> dict[str, Tensor]:
    """Return a copy of a head's weights on the CPU; numbers are in fp32."""
    return {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in head.state_dict().items()
    }


@torch.no_grad()
def load_weights(head: DraftHead, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a head, in its dtype and where it is."""
    for name, tensor in head.state_dict().items():
        tensor.copy_(weights[name])


def check_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], tokens: Tensor | None, what: str
) -> None:
    """Refuse weights that are not of a head of these shapes.

    Args:
        weights: By name.
        shapes: Of the head's weights, by name.
        tokens: `[K]` the head's draft vocabulary, which never changes; None if it drafts all tokens.
        what: For the message.

    Raises:
        LoadError: A tensor is missing, unknown, misshapen or not finite, or the draft vocabulary is another.
    """
    if names := sorted(shapes.keys() ^ weights.keys()):
        raise LoadError(f"{what} is of another shape than the one that drafts: tensor {names[0]!r}")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise LoadError(f"{what}: tensor {name!r} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"{what}: tensor {name!r} holds values that are not finite")
    if tokens is not None and not torch.equal(weights["vocabulary.tokens"].cpu(), tokens):
        raise LoadError(f"{what} has another draft vocabulary than the one that drafts")

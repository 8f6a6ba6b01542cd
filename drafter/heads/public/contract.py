"""What a published head says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.errors import LoadError, shown

Json = Mapping[str, Any]


@dataclass(frozen=True)
class PublicHead:
    """A published head in our terms.

    Args:
        layout: Whose layout it is in.
        algorithm: A key of `HEADS`.
        fields: Of its configuration.
        tensors: Its weights by our names.
        made_for: Hub id or path of its base, if it says so.
    """

    layout: str
    algorithm: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    made_for: str | None


def number(name: str, config: Json, key: str, default: float | None = None) -> int | float:
    """Return a number of a published configuration.

    Raises:
        LoadError: It is missing and has no default, or is no number.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LoadError(f"draft head {name!r}: its config.json says {key} = {shown(value)}, which is no number")
    return value


def count(name: str, config: Json, key: str, default: int | None = None) -> int:
    """Return how many of something a published configuration says there are.

    Raises:
        LoadError: It is missing and has no default, or is no integer above 0.
    """
    value = number(name, config, key, default)
    if not isinstance(value, int) or value < 1:
        raise LoadError(
            f"draft head {name!r}: its config.json says {key} = {shown(value)}, which is no integer above 0"
        )
    return value


def group(name: str, config: Json, key: str) -> Json:
    """Return a part of a published configuration; empty if it is missing or null.

    Raises:
        LoadError: It is something else than named values.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LoadError(f"draft head {name!r}: its config.json says {key} = {shown(value)}, which are no named values")
    return value


def refuse_other_base(name: str, base: BaseModel, made_for: str | None, sizes: Mapping[str, int]) -> None:
    """Raise `LoadError` if a head of these `sizes` (`hidden_size`, `vocab_size`) cannot draft for `base`."""
    for what, size in sizes.items():
        if size != getattr(base, what):
            whose = f"the base {made_for!r}" if made_for else "another base"
            raise LoadError(
                f"draft head {name!r} belongs to {whose}, not to {base.name!r}: its {what} is {size:,}, and "
                f"that of the base {getattr(base, what):,}; load the base that it was trained for"
            )


def refuse_other_embeddings(name: str, base: BaseModel, embeddings: Tensor) -> None:
    """Raise `LoadError` unless a head's copy `[V, d]` of the token embeddings is the base's, up to rounding."""
    own = base.embed(torch.arange(base.vocab_size, device=base.device)).cpu().float()
    if embeddings.shape != own.shape or bool(((embeddings.float() - own).abs() > 0.01 * own.abs().amax()).any()):
        raise LoadError(
            f"draft head {name!r} does not belong to {base.name!r}: the token embeddings that it was trained with are "
            "others; load the base that it was trained for"
        )

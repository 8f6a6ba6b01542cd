"""Drafters by name. A new algorithm is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drafter.base_model import BaseModel
from drafter.drafters.contract import Drafter
from drafter.drafters.ensemble import EnsembleDrafter
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.plain import PlainDecoding
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS

TRAINING_FREE: dict[str, Callable[[], Drafter]] = {"none": PlainDecoding, "ngram": NgramDrafter}
"""Drafters that need no weights."""


def load_drafter(name: str | Path, base: BaseModel) -> Drafter:
    """A drafter for `base`.

    Args:
        name: `none`, `ngram`, the name of an embedded head, a head's folder or hub id, two of these joined by `+`,
            or `auto`: the embedded CTC head for the embedded base, `ngram` for any other.

    Raises:
        LoadError: There is no such drafter, or it belongs to another base.
    """
    name = str(name)
    if name == "auto":
        name = "ctc" if Path(base.name) == EMBEDDED_BASE else "ngram"
    if name in TRAINING_FREE:
        return TRAINING_FREE[name]()
    if "+" in name and not Path(name).exists():
        first, second = name.split("+", 1)
        return EnsembleDrafter(load_drafter(first, base), load_drafter(second, base))
    raise NotImplementedError

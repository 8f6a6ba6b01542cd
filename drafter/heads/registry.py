"""Draft heads by the name of their algorithm. A new head is one module, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.errors import LoadError
from drafter.heads.contract import DraftHead
from drafter.heads.ctc.ctc_head import CTCHead
from drafter.heads.head_config import head_config
from drafter.heads.hydra import HydraHead
from drafter.heads.medusa import MedusaHead

HEADS: dict[str, type[DraftHead]] = {head.algorithm: head for head in (CTCHead, MedusaHead, HydraHead)}
"""Class of each algorithm."""


def new_head(algorithm: str, base: BaseModel, settings: Mapping[str, Any]) -> DraftHead:
    """Return an untrained head for `base`, on its device, in float32.

    Args:
        algorithm: A key of `HEADS`.
        base: The base that it will draft for. It decides `hidden_size` and `vocab_size`.
        settings: Other fields of the algorithm's configuration.

    Raises:
        LoadError: There is no such algorithm or field, or a value is not allowed.
    """
    if algorithm not in HEADS:
        raise LoadError(f"no draft head {algorithm!r}: known are {', '.join(HEADS)}")
    sizes = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    head = HEADS[algorithm](head_config(algorithm, HEADS[algorithm].config_class, {**settings, **sizes}))
    head.start_from(base)
    return head.to(base.device)

"""Draft heads by the name of their algorithm. A new head is one module and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.errors import LoadError
from drafter.heads.checkpoint import build_config
from drafter.heads.contract import DraftHead
from drafter.heads.ctc.ctc_head import CTCHead
from drafter.heads.hydra import HydraHead
from drafter.heads.medusa import MedusaHead

HEADS: dict[str, type[DraftHead]] = {head.algorithm: head for head in (CTCHead, MedusaHead, HydraHead)}
"""Trained draft heads by algorithm."""


def new_head(algorithm: str, base: BaseModel, settings: Mapping[str, Any]) -> DraftHead:
    """An untrained head for `base`, on its device, in float32.

    Args:
        algorithm: A key of `HEADS`.
        base: The base it is to draft for; its sizes become the head's.
        settings: Fields of the algorithm's configuration to set.

    Raises:
        LoadError: There is no such algorithm or setting, or a value does not do.
    """
    if algorithm not in HEADS:
        raise LoadError(f"no draft head {algorithm!r}: known are {', '.join(HEADS)}")
    sizes = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    head = HEADS[algorithm](build_config(algorithm, HEADS[algorithm].config_class, {**settings, **sizes}))
    head.start_from(base)
    return head.to(base.device)

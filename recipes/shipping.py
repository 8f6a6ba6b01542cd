"""Put a trained head where those of the project are, packed: a byte a weight is precise enough for drafting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drafter.heads.checkpoint import load_head, save_head
from drafter.target_model.model import BaseModel


def ship(trained: Path, base: BaseModel, base_name: str, target: Path) -> None:
    """Save a trained head, packed.

    Args:
        trained: The head's folder.
        base: Its base.
        base_name: What the head calls its base: the path on this machine means nothing elsewhere.
        target: Folder of the shipped head.

    Raises:
        LoadError: There is no head, or it belongs to another base.
    """
    head = load_head(trained, base).bfloat16()
    assert head.provenance is not None
    head.provenance = replace(head.provenance, base_name=base_name)
    save_head(head, target, packed=True)

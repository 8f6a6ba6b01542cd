"""The models that ship with the project, with their cards: a small base, a hybrid, one that sees, and draft heads."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_BASE = Path(__file__).parent / "base"
"""Folder of the embedded base model."""
EMBEDDED_HYBRID = Path(__file__).parent / "hybrid"
"""Folder of an embedded model with recurrent layers, which answers as the embedded base does."""
EMBEDDED_DIGITS = Path(__file__).parent / "digits"
"""Folder of the embedded model that sees."""
EMBEDDED_HEADS = Path(__file__).parent / "heads"
"""Folder of the embedded base's draft heads, a folder an algorithm."""
OTHER_HEADS = Path(__file__).parent / "other_heads"
"""Folder of draft heads of bases that do not ship with the project, a folder a base."""


def embedded_heads() -> list[str]:
    """Return the names of the embedded base's draft heads."""
    return sorted(config.parent.name for config in EMBEDDED_HEADS.glob("*/config.json"))

"""The demonstration models that ship with the project: a small base and its draft heads, with their cards."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_BASE = Path(__file__).parent / "base"
"""Folder of the embedded base model."""
EMBEDDED_HEADS = Path(__file__).parent / "heads"
"""Folder of the embedded base's draft heads, a folder an algorithm."""

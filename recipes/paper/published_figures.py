"""Figures that others have published, from `published.yaml`."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from recipes.paper.paper_config import HERE


@dataclass(frozen=True)
class Published:
    """What somebody has published of a method.

    Args:
        base: The base, as `base.name` of a configuration names it.
        questions: The set of questions.
        method: The row of the table that it stands beside; None if it has a row of its own.
        name: What its authors call it.
        beta: New tokens per forward of the base.
        gamma: Speed relative to plain decoding, on its authors' machine.
        source: Where it stands.
    """

    base: str
    questions: str
    method: str | None
    name: str
    beta: float
    gamma: float
    source: str


def published_for(base: str) -> list[Published]:
    """Return what is published for a base."""
    entries = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    return [one for one in (Published(**entry) for entry in entries) if one.base == base]

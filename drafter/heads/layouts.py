"""Finds the published layout that a head is in."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from torch import Tensor

from drafter.errors import LoadError, shown
from drafter.heads.published import Json, Layout, PublicHead
from drafter.plugins import resolved
from drafter.target.model import BaseModel

_log = logging.getLogger(__name__)


def public_config(file: Path) -> Json | None:
    """Return a `config.json` if it is a published head's; None otherwise."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, RecursionError, ValueError):
        return None  # the loader of our own format reports the error
    if not isinstance(config, dict) or "algorithm" in config:
        return None
    return config if _layout_of(config) is not None or "speculators_model_type" in config else None


def read_public(name: str, config: Json, tensors: dict[str, Tensor], base: BaseModel) -> PublicHead:
    """Convert a published head.

    Raises:
        LoadError: It belongs to another target model, or its kind is not supported.
    """
    if (layout := _layout_of(config)) is None:
        kind = config["speculators_model_type"]
        raise LoadError(f"draft head {name!r} is a speculators head of kind {shown(kind)}: only 'eagle3' can be loaded")
    found = layout.read(name, config, tensors, base)
    made_for = found.made_for
    if made_for is not None and not isinstance(made_for, str):
        raise LoadError(f"draft head {name!r}: its config.json names as its model {shown(made_for)}, which is no text")
    if made_for and Path(made_for).name.lower() != Path(base.name).name.lower():
        _log.warning(
            "draft head %r was made for %r and has the sizes of %r, which it drafts for", name, made_for, base.name
        )
    return found


def _layout_of(config: Json) -> Layout | None:
    """Return the layout of a published head's configuration, or None."""
    return next((one for one in layouts() if one.recognises(config)), None)


def layouts() -> list[Layout]:
    """Return the layouts of all methods."""
    return list(resolved("layouts").values())

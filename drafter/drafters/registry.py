"""Drafters by name. A new algorithm is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter.base.causal_lm import BaseModel
from drafter.drafters.cacheback import CachebackDrafter
from drafter.drafters.contract import Drafter
from drafter.drafters.memory import MemoryDrafter
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.names import kind_and_rest, merged_names
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.none import PlainDecoding
from drafter.embedded import EMBEDDED_HEADS, OTHER_HEADS
from drafter.errors import LoadError
from drafter.heads.checkpoint import is_head_of, load_head
from drafter.heads.early_exit.exit_drafter import named_exit
from drafter.heads.registry import HEADS

TRAINING_FREE: dict[str, Callable[[int], Drafter]] = {
    "none": lambda nodes: PlainDecoding(),
    "ngram": lambda nodes: NgramDrafter(nodes),
    "memory": lambda nodes: MemoryDrafter(nodes),
    "cacheback": lambda nodes: CachebackDrafter(nodes),
}
"""Drafters that need no weights, by name; made for a number of draft nodes."""
ISOLATED: dict[str, Callable[[int], Drafter]] = {
    "memory": lambda nodes: MemoryDrafter(nodes, isolated=True),
    "cacheback": lambda nodes: CachebackDrafter(nodes, isolated=True),
}
"""Those of them that would draft a text from others, kept from it."""


@dataclass(frozen=True)
class Loading:
    """What a drafter is made for.

    Args:
        base: The base it drafts for.
        nodes: Draft nodes of its largest trees.
        isolated: Whether no text may be drafted from another one.
    """

    base: BaseModel
    nodes: int
    isolated: bool = False

    def load(self, name: str) -> Drafter:
        """Load another drafter for the same use; see `load_drafter`."""
        return load_drafter(name, self.base, self.nodes, isolated=self.isolated)


NAMED_WITH_COLON: dict[str, Callable[[str, Loading], Drafter]] = {
    "exit": lambda rest, loading: named_exit(rest, loading.base, loading.nodes),
}
"""Drafters that are named `kind:rest`, by kind; made from the rest."""


def useful_nodes(device: torch.device) -> int:
    """Draft nodes that can pay at most: on a CPU each costs time, on a GPU they are nearly free. See `NODE_COUNTS`."""
    return 15 if device.type == "cpu" else 63


def shipped_head(base: BaseModel) -> Path | None:
    """Return the folder of the CTC head that ships with the project for `base`; None if there is none."""
    folders = [EMBEDDED_HEADS / "ctc", *sorted(config.parent for config in OTHER_HEADS.glob("*/config.json"))]
    return next((folder for folder in folders if is_head_of(folder, base)), None)


def load_drafter(name: str | Path, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
    """A drafter for `base`.

    Args:
        name: `none`, `ngram`, `memory`, `cacheback`, `exit:N` (the base's first N layers), the algorithm of an embedded
            head (`ctc`), a head's folder or hub id, several of these joined by `+`, or `auto`: the CTC head that ships
            with the project for this base, else `ngram`.
        base: The base it drafts for.
        nodes: Draft nodes of its largest trees.
        isolated: Whether no text may be drafted from another one.

    Raises:
        LoadError: There is no such drafter, or it belongs to another base.
    """
    name, loading = str(name), Loading(base, nodes, isolated)
    if nodes < 1:
        name = "none"
    if name == "auto":
        name = str(shipped_head(base) or "ngram")
    if name in TRAINING_FREE:
        return ((ISOLATED.get(name) if isolated else None) or TRAINING_FREE[name])(nodes)
    kind, rest = kind_and_rest(name)
    members = merged_names(name)
    if len(members) > 1:
        return MergedDrafter(*map(loading.load, members))
    if kind in NAMED_WITH_COLON:
        return NAMED_WITH_COLON[kind](rest, loading)
    if name in HEADS:
        name = str(EMBEDDED_HEADS / name)
    elif "/" not in name and not Path(name).exists():
        known = ", ".join([*TRAINING_FREE, *(f"{one}:…" for one in NAMED_WITH_COLON), *HEADS, "auto"])
        raise LoadError(f"no drafter {name!r}: use {known}, a draft head's folder or hub id, or several joined by '+'")
    return load_head(name, base, HEADS).drafter(base, nodes)

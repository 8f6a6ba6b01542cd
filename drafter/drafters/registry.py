"""Drafters by name: plain decoding, `auto`, merged ones, draft heads, and those of the methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from drafter.drafters.contract import Drafter, Loading, PlainDecoding
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.drafters.names import candidates, check_name, kind_and_rest, merged_names
from drafter.drafters.target import Target
from drafter.embedded import EMBEDDED_HEADS, OTHER_HEADS, embedded_heads
from drafter.errors import LoadError
from drafter.heads.checkpoint import is_head_of, load_head
from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead, measured_worth
from drafter.plugins import registered, resolved

TRAINING_FREE: dict[str, Callable[[Loading], Drafter]] = {
    "none": lambda loading: PlainDecoding(),
    **resolved("drafters"),
}
"""Drafters that need no weights, by name."""
FAMILIES: dict[str, Callable[[str, Loading], Drafter]] = {
    "auto": lambda rest, loading: _chosen_among(rest, loading),
    **resolved("families"),
}
"""Drafters `KIND:REST`, by kind."""


def _automatic_as(*roles: str) -> list[str]:
    return [name for name, role in registered("automatic").items() if role in roles]


HEAD_AND_TEXTS = ("head", *_automatic_as("merged"))
"""Members of `auto` that also draft together."""


def load_drafter(name: str | Path, base: Target, nodes: int, *, isolated: bool = False) -> Drafter:
    """Load a drafter for `base`; `SpeculativeLM.from_pretrained` lists the names.

    Args:
        nodes: Draft tokens of its largest trees.
        isolated: Never draft from another request's text.

    Raises:
        LoadError: There is no such drafter, or it belongs to another target model.
    """
    return _load(str(name), Loading(base, nodes, isolated, _load))


def _load(name: str, loading: Loading) -> Drafter:
    if loading.nodes < 1:
        name = "none"
    if name == "auto":
        return _automatic(loading)
    if name in TRAINING_FREE:
        return TRAINING_FREE[name](loading)
    kind, rest = kind_and_rest(name)
    members = merged_names(name)
    if len(members) > 1:
        return MergedDrafter(*map(loading.load, members))
    if kind in FAMILIES:
        return FAMILIES[kind](rest, loading)
    check_name(name)
    if name in embedded_heads():
        name = str(EMBEDDED_HEADS / name)
    return head_drafter(load_head(name, loading.base), loading.base, loading.nodes)


def head_drafter(head: DraftHead, base: Target, nodes: int, tree: Tree = "exact") -> Drafter:
    """Return the drafter of a head, with what its trees were worth on held-out text.

    Raises `ValueError` if it has no such tree.
    """
    drafter = head.drafter(base, nodes, tree)
    drafter.worth = measured_worth(head.provenance)
    return drafter


def _automatic(loading: Loading) -> Drafter:
    """Return the shipped head and what drafts from texts, of which a budget chooses.

    On a GPU, where no choice among them has been measured, there is one alone.
    """
    head = shipped_head(loading.base)
    if loading.base.device.type != "cpu":
        return loading.load(str(head or next(iter(_automatic_as("alone")), "none")))
    return beside_texts(None if head is None else loading.load(str(head)), loading)


def _chosen_among(rest: str, loading: Loading) -> Drafter:
    names = candidates(rest)
    if not all(names) or len(set(names)) < len(names):
        raise LoadError(f"drafter 'auto:{rest}': name different drafters, with commas between them")
    return ChoosingDrafter({name: loading.load(name) for name in names})


def beside_texts(head: Drafter | None, loading: Loading, *, first: bool = True) -> Drafter:
    """Combine drafters from other texts with a head, if there is one, as alternatives and merged.

    With `first` the head is tried first, and drafts where no budget chooses.
    """
    others: dict[str, Drafter] = {name: loading.load(name) for name in _automatic_as("merged", "beside")}
    if head is None:
        return ChoosingDrafter(others) if others else PlainDecoding()
    named: dict[str, Drafter] = {"head": head, **others} if first else {**others, "head": head}
    return ChoosingDrafter(named, together=[HEAD_AND_TEXTS] if len(HEAD_AND_TEXTS) > 1 else [])


def shipped_head(base: Target) -> Path | None:
    """Return the folder of the CTC head that ships with the project for `base`; None if there is none."""
    folders = [EMBEDDED_HEADS / "ctc", *sorted(config.parent for config in OTHER_HEADS.glob("*/config.json"))]
    return next((folder for folder in folders if is_head_of(folder, base)), None)


def useful_nodes(device: torch.device) -> int:
    """Return the most draft tokens that can pay: they cost time on a CPU, and little on a GPU; see `NODE_COUNTS`."""
    return 15 if device.type == "cpu" else 63

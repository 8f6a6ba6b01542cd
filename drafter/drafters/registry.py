"""Drafters by name. A new algorithm is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.drafters.names import candidates, check_name, kind_and_rest, length_and_drafter, merged_names
from drafter.embedded import EMBEDDED_HEADS, OTHER_HEADS
from drafter.errors import LoadError
from drafter.heads.checkpoint import is_head_of, load_head
from drafter.heads.registry import HEADS
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.cacheback.frozen_table import Vocabulary, load_table
from drafter.methods.draft_models.stack import load_model_drafter, load_stack
from drafter.methods.early_exit.drafter import named_exit
from drafter.methods.fly.long_chain import LongChainDrafter
from drafter.methods.learning.drafter import ChangingHead, StartingHead
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.target.loading import load_tokenizer
from drafter.target.model import BaseModel
from drafter.text.streaming import vocabulary_digest

TRAINING_FREE: dict[str, Callable[[int], Drafter]] = {
    "none": lambda nodes: PlainDecoding(),
    "ngram": lambda nodes: NgramDrafter(nodes),
    "memory": lambda nodes: MemoryDrafter(nodes),
    "cacheback": lambda nodes: CachebackDrafter(nodes),
}
"""Drafters that need no weights, by name; made for a number of draft nodes."""
SHIPPED = [name for name in HEADS if (EMBEDDED_HEADS / name).is_dir()]
"""The embedded model's draft heads."""
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
        """Load another drafter for the same use, as a part of one; see `load_drafter`.

        Raises:
            LoadError: There is none of that name, or it would be chosen by a budget, which only a whole drafter can be.
        """
        drafter = load_drafter(name, self.base, self.nodes, isolated=self.isolated)
        if drafter.members:
            raise LoadError(f"drafter {name!r} chooses among drafters and cannot be part of another: use it alone")
        return drafter


def _chosen_among(rest: str, loading: Loading) -> Drafter:
    names = candidates(rest)
    if not all(names) or len(set(names)) < len(names):
        raise LoadError(f"drafter 'auto:{rest}': name different drafters, with commas between them")
    if loading.base.device.type != "cpu":  # a step is recorded with its drafter
        return loading.load(names[0])
    return ChoosingDrafter({name: loading.load(name) for name in names})


def _long_chain(rest: str, loading: Loading) -> Drafter:
    found = length_and_drafter(rest)
    if found is None:
        raise LoadError(f"drafter 'long:{rest}': use long:N:DRAFTER, such as long:15:ngram")
    length, name = found
    return LongChainDrafter(loading.load(name), length)


def _with_frozen_table(path: str, loading: Loading) -> Drafter:
    base = loading.base
    vocabulary = Vocabulary(vocabulary_digest(load_tokenizer(base.name)), base.vocab_size)
    return CachebackDrafter(loading.nodes, isolated=loading.isolated, frozen=load_table(path, vocabulary))


NAMED_WITH_COLON: dict[str, Callable[[str, Loading], Drafter]] = {
    "auto": _chosen_among,
    "cacheback": _with_frozen_table,
    "exit": lambda rest, loading: named_exit(rest, loading.base, loading.nodes),
    "long": _long_chain,
    "model": lambda rest, loading: load_model_drafter(rest, loading.base, loading.nodes),
    "stack": lambda rest, loading: load_stack(
        rest, loading.base, loading.nodes, lambda name, nodes: replace(loading, nodes=nodes).load(name)
    ),
}
"""Drafters that are named `kind:rest`, by kind; made from the rest."""


def useful_nodes(device: torch.device) -> int:
    """Draft nodes that can pay at most: on a CPU each costs time, on a GPU they are nearly free. See `NODE_COUNTS`."""
    return 15 if device.type == "cpu" else 63


def shipped_head(base: BaseModel) -> Path | None:
    """Return the folder of the CTC head that ships with the project for `base`; None if there is none."""
    folders = [EMBEDDED_HEADS / "ctc", *sorted(config.parent for config in OTHER_HEADS.glob("*/config.json"))]
    return next((folder for folder in folders if is_head_of(folder, base)), None)


def automatic(loading: Loading) -> Drafter:
    """Return the drafter `auto`: all that are to be had for a base, and the head merged with what other texts said,
    among which a budget chooses.

    On a GPU a step is recorded with its drafter, so there is one alone: the head that ships, or else `ngram`.
    """
    head = shipped_head(loading.base)
    if loading.base.device.type != "cpu":
        return loading.load(str(head or "ngram"))
    return _beside_texts(None if head is None else loading.load(str(head)), loading)


def _beside_texts(head: Drafter | None, loading: Loading, *, first: bool = True) -> Drafter:
    """What drafts from other texts, beside a head, if there is one, and merged with it.

    `ngram` is not among them: `cacheback` costs less, and at batch 1 drafts better on every kind of prompt
    (docs/drafters.md).

    Args:
        head: The head.
        loading: The use.
        first: Whether the head is tried first, and drafts where no budget chooses.
    """
    others = {name: loading.load(name) for name in ("cacheback", "memory")}
    if head is None:
        return ChoosingDrafter(others)
    named = {"head": head, **others} if first else {**others, "head": head}
    return ChoosingDrafter(named, together=[_HEAD_AND_TEXTS])


def load_drafter(name: str | Path, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
    """A drafter for `base`.

    Args:
        name: `none`, `ngram`, `memory`, `cacheback`, `cacheback:` and a table of `jobs.cache`, `exit:N` (the base's
            first N layers), the algorithm of an embedded head (`ctc`), a head's folder or hub id, `model:` and a draft
            model's folder or hub id, several of these joined by `+`, `long:N:DRAFTER` (a chain of N tokens that
            n-grams go on with), `stack:LOWER>model:A` (see `load_stack`), or `auto`: the CTC head that ships with the
            project for this base, alone and merged with `cacheback`, `cacheback` and `memory`, of which the fastest
            drafts; `auto:A,B` chooses among these.
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
        return automatic(loading)
    if name in TRAINING_FREE:
        return ((ISOLATED.get(name) if isolated else None) or TRAINING_FREE[name])(nodes)
    kind, rest = kind_and_rest(name)
    members = merged_names(name)
    if len(members) > 1:
        return MergedDrafter(*map(loading.load, members))
    if kind in NAMED_WITH_COLON:
        return NAMED_WITH_COLON[kind](rest, loading)
    check_name(name)
    if name in SHIPPED:
        name = str(EMBEDDED_HEADS / name)
    return load_head(name, base, HEADS).drafter(base, nodes)


_HEAD_AND_TEXTS = ("head", "cacheback")
"""Members of `auto` that also draft together: a head knows what is likely, texts what was said before."""
LEARNT_MEMBERS = ("head", "+".join(_HEAD_AND_TEXTS))
"""Members of `auto` that draft with a head that learns."""
SHIPPED_OR_NEW = "shipped"
"""As `StartingHead.folder`: the head that ships with the project for a base, or a new one where none does."""


def found_start(start: StartingHead, base: BaseModel) -> StartingHead:
    """Return what a head begins with for `base`, with `SHIPPED_OR_NEW` replaced by what that comes to."""
    if start.folder != SHIPPED_OR_NEW:
        return start
    shipped = shipped_head(base)
    return replace(start, folder=None if shipped is None else str(shipped))


def load_learning_drafter(
    name: str, base: BaseModel, nodes: int, start: StartingHead, *, isolated: bool = False
) -> Drafter:
    """A drafter whose head is replaced by better versions of it as they come; see `ChangingHead`.

    Args:
        name: `auto`: the head, what needs no training, and both merged, of which the fastest drafts; on a GPU the head
            merged with `ngram`. Or the name of the head that it starts from: that head alone.
        base: The base it drafts for.
        nodes: Draft nodes of its largest trees.
        start: What the head begins with; see `found_start`.
        isolated: Whether no text may be drafted from another one.

    Raises:
        LoadError: Nothing is to be drafted, the name is another one, or the head cannot be loaded.
    """
    if nodes < 1:
        raise LoadError("a head that learns is to draft: with nodes 0 nothing is drafted")
    if name not in ("auto", start.folder):
        raise LoadError(f"drafter {name!r} has no head that could learn: use auto, or the head that it starts from")
    start = found_start(start, base)
    head = ChangingHead(start, base, nodes)
    if name != "auto":
        return head
    loading = Loading(base, nodes, isolated)
    if base.device.type != "cpu":  # a step is recorded with its drafter
        return MergedDrafter(head, loading.load("ngram"))
    return _beside_texts(head, loading, first=start.drafts)

"""The head that engines and their learner start from, and a drafter that hot-swaps newer versions of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafter import devices
from drafter.devices import in_passing_thread
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, Loading, Loan, made_of
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.registry import beside_texts, load_drafter, shipped_head
from drafter.drafters.slots import NO_TEXT
from drafter.embedded import EMBEDDED_HEADS
from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head, new_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.methods.learning.rows import SampleTap
from drafter.methods.learning.settings import SHIPPED_OR_NEW, StartingHead
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, root_only

# label_context 1 learns about as fast and drafts better, and its search is native on a CPU.
_SETTINGS: dict[str, dict[str, Any]] = {"ctc": {"label_context": 1}}
LEARNT = "learnt"  # key of a learner's record in `Provenance.training`


def weights_of(head: DraftHead) -> dict[str, Tensor]:
    """Return a copy of a head's weights on the CPU; floats in fp32."""
    return {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in head.state_dict().items()
    }


@torch.no_grad()
def load_weights(head: DraftHead, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a head, keeping its dtype and device."""
    for name, tensor in head.state_dict().items():
        tensor.copy_(weights[name])


def check_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], tokens: Tensor | None, what: str
) -> None:
    """Raise `LoadError`, about `what`, if weights cannot replace a head's.

    The head has these `shapes`, and the draft vocabulary `tokens` `[K]`, if any.
    """
    if names := sorted(shapes.keys() ^ weights.keys()):
        raise LoadError(f"{what} is of another shape than the one that drafts: tensor {names[0]!r}")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise LoadError(f"{what}: tensor {name!r} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"{what}: tensor {name!r} holds values that are not finite")
    if tokens is not None and not torch.equal(weights["vocabulary.tokens"].cpu(), tokens):
        raise LoadError(f"{what} has another draft vocabulary than the one that drafts")


def load_start(start: StartingHead, base: BaseModel) -> DraftHead:
    """Return the starting head in evaluation mode, on the target model's device and in its dtype.

    Raises `LoadError` if it cannot be loaded or made; a new one cannot have a draft vocabulary.
    """
    if start.folder is not None:
        embedded = EMBEDDED_HEADS / start.folder
        return load_head(embedded if embedded.is_dir() else start.folder, base)
    if start.settings.get("draft_vocab_size") is not None:
        raise LoadError(
            f"draft head {start.algorithm!r}: a draft_vocab_size is chosen by how often tokens occur, and a head "
            "that starts from nothing has no texts yet: leave it out, or start from a trained head that has one"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start.seed)
        head = new_head(start.algorithm, base, start.settings or _SETTINGS.get(start.algorithm, {}))
    head.provenance = Provenance(base.name, base.fingerprint)
    return head.to(base.device, base.dtype).eval().requires_grad_(False)


def version_of(head: DraftHead) -> int:
    """Return the version number that a learner saved a head with; 0 for any other head."""
    learnt = {} if head.provenance is None else head.provenance.training.get(LEARNT, {})
    return int(learnt.get("version", 0))


@dataclass(frozen=True)
class _Ready:
    """A version for the next step: a drafter, or, with None, weights to copy into place."""

    number: int
    drafter: Drafter | None
    weights: Mapping[str, Tensor]


class ChangingHead(MergedDrafter):
    """Hot-swaps newer versions of a head between steps. A new head drafts nothing before its first version.

    With `in_place`, the default where steps are CUDA graphs, new weights are copied into place. Raises `LoadError` if
    the head cannot be loaded.
    """

    def __init__(self, start: StartingHead, base: BaseModel, nodes: int, *, in_place: bool | None = None) -> None:
        self._base, self._nodes = base, nodes
        head = load_start(start, base)
        self._in_place = devices.is_asynchronous(base.device) if in_place is None else in_place
        # Decoding with a head changes its weights' layout, so later versions start from a copy.
        self._head = head if self._in_place else deepcopy(head)
        self._own = self._head.state_dict()
        self._tokens = None if head.vocabulary is None else head.vocabulary.tokens.cpu().clone()
        self._number = version_of(head) if start.drafts else None
        self._gated = not start.drafts
        super().__init__(head.drafter(base, nodes))
        self._gate = torch.full((), start.drafts, device=base.device)
        self._loan: Loan | None = None
        self._lock = threading.Lock()
        self._ready: _Ready | None = None
        self._offered = version_of(head)

    @property
    def version(self) -> int | None:
        return self._number

    @property
    def drafts(self) -> bool:  # type: ignore[override]
        return self._number is not None

    def offer(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Prepare a hot swap to other weights, from any thread but the engine's: all slow work is done here.

        Args:
            number: Version; ignored if not newer than the present one.
            weights: By name, on the CPU.

        Raises:
            LoadError: The weights do not fit the head or are not finite. It is then unchanged.
        """
        if number <= self._offered:
            return
        shapes = {name: own.shape for name, own in self._own.items()}
        check_weights(weights, shapes, self._tokens, f"version {number} of the head")
        ready = in_passing_thread(lambda: self._make_ready(number, weights))
        loan = self._loan
        if ready.drafter is not None and loan is not None:
            ready.drafter.open(loan)  # outside the lock: no step waits for it
        with self._lock:
            if number > self._offered:
                if ready.drafter is not None and loan is not self._loan and self._loan is not None:
                    ready.drafter.open(self._loan)  # the engine has started meanwhile
                self._ready, self._offered = ready, number

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self._swap()

    def prepare(self, context: DraftContext) -> None:
        self._swap()
        super().prepare(context)

    def _swap(self) -> None:
        """Take the newest weights that were offered, if any: quickly, without waiting for the device."""
        if self._ready is None:
            return
        with self._lock:
            ready, self._ready = self._ready, None
        if ready.drafter is not None:
            self.drafters = (ready.drafter,)
        else:
            for name, tensor in ready.weights.items():
                self._own[name].copy_(tensor, non_blocking=True)
            self._head.weights_changed(self._base)
            self._forget()
        self._number = ready.number
        self._gate.fill_(True)

    def _make_ready(self, number: int, weights: Mapping[str, Tensor]) -> _Ready:
        if self._in_place:
            staged = {name: devices.staged(weights[name].to(own.dtype), own.device) for name, own in self._own.items()}
            return _Ready(number, None, staged)
        head = deepcopy(self._head)
        load_weights(head, weights)
        return _Ready(number, head.drafter(self._base, self._nodes), {})

    def _forget(self) -> None:
        """Make the drafter read all sequences again: its states come from the old weights."""
        for slot in range(0 if self._loan is None else self._loan.slots):
            for state in self.slots:
                state.enter(slot, NO_TEXT)

    def open(self, loan: Loan) -> None:
        with self._lock:
            self._loan = loan
            super().open(loan)
            if self._ready is not None and self._ready.drafter is not None:
                self._ready.drafter.open(loan)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]`; before the first version only roots, padded.

        The head drafts even then: its cost is measured, and a recorded step must be the same later.
        """
        tree = self.drafters[0].propose(context, ask)
        return _gated(tree, self._gate) if self._gated else tree


def changing_head(drafter: Drafter) -> ChangingHead:
    """Return the head that learns, of a drafter that `Learning` has loaded."""
    return next(one for one in made_of(drafter) if isinstance(one, ChangingHead))


def _gated(tree: TokenTree, gate: Tensor) -> TokenTree:
    """Return `tree` where `gate`, a bool scalar on the device, is true, else roots alone; without a device sync."""
    closed = root_only(tree.tokens[:, 0]).padded(tree.size)
    parts = zip(vars(tree).values(), vars(closed).values(), strict=True)
    return TokenTree(*(torch.where(gate, drafted, padding) for drafted, padding in parts))


def found_start(start: StartingHead, base: BaseModel) -> StartingHead:
    """Resolve `SHIPPED_OR_NEW` for a target model."""
    if start.folder != SHIPPED_OR_NEW:
        return start
    shipped = shipped_head(base)
    return replace(start, folder=None if shipped is None else str(shipped))


@dataclass(frozen=True)
class Learning:
    """Makes `SpeculativeLM` draft with a head that learns from its rows; see `LearningStart`."""

    start: StartingHead

    def drafter(self, name: str, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
        """Load a drafter whose head is hot-swapped as better versions come; see `ChangingHead`.

        `auto` is the head, the training-free drafters and both merged, of which the fastest drafts; on a GPU, the head
        merged with `ngram`. The name of the starting head is that head alone. With `isolated`, no text of another
        request is drafted from. Raises `LoadError` for another name, 0 nodes, or a head that cannot be loaded.
        """
        if nodes < 1:
            raise LoadError("a head that learns is to draft: with nodes 0 nothing is drafted")
        if name not in ("auto", self.start.folder):
            raise LoadError(f"drafter {name!r} has no head that could learn: use auto, or the head that it starts from")
        start = found_start(self.start, base)
        head = ChangingHead(start, base, nodes)
        if name != "auto":
            return head
        loading = Loading(
            base, nodes, isolated, lambda other, use: load_drafter(other, use.base, use.nodes, isolated=use.isolated)
        )
        if base.device.type != "cpu":  # the CUDA graph of a step includes its drafter
            return MergedDrafter(head, loading.load("ngram"))
        return beside_texts(head, loading, first=start.drafts)

    def tap(self) -> SampleTap:
        return SampleTap()

"""What engines and their learner begin with: a head that there is, or a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drafter.base.causal_lm import BaseModel
from drafter.embedded import EMBEDDED_HEADS
from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.registry import HEADS, new_head

# Frames that know a label learn about as fast and draft better, and their search is native on a CPU.
_SETTINGS: dict[str, dict[str, Any]] = {"ctc": {"label_context": 1}}
LEARNT = "learnt"
"""Key of `Provenance.training` under which a learner says what it has done."""


@dataclass(frozen=True)
class StartingHead:
    """A head by name, or the shape of a new one. All that learn together begin with the same.

    Args:
        folder: A head's folder or hub id, or the algorithm of an embedded head; None for a new head.
        algorithm: Kind of a new head.
        settings: Fields of a new head's configuration; none for those with which it learns fast.
        seed: Of a new head's weights.
        copied_from: Where the folder is a copy of, if it is one; for provenance.
    """

    folder: str | None = None
    algorithm: str = "ctc"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    copied_from: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether it drafts before it has learnt anything."""
        return self.folder is not None

    def load(self, base: BaseModel) -> DraftHead:
        """Return the head in evaluation mode, on `base`'s device and in its dtype.

        Raises:
            LoadError: There is no such head or algorithm, it belongs to another base, or a new one has a draft
                vocabulary, which is chosen by texts that are not there yet.
        """
        if self.folder is not None:
            embedded = EMBEDDED_HEADS / self.folder
            return load_head(embedded if embedded.is_dir() else self.folder, base, HEADS)
        if self.settings.get("draft_vocab_size") is not None:
            raise LoadError(
                f"draft head {self.algorithm!r}: a draft_vocab_size is chosen by how often tokens occur, and a head "
                "that starts from nothing has no texts yet: leave it out, or start from a trained head that has one"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = new_head(self.algorithm, base, self.settings or _SETTINGS.get(self.algorithm, {}))
        head.provenance = Provenance(base.name, base.fingerprint)
        return head.to(base.device, base.dtype).eval().requires_grad_(False)


def version_of(head: DraftHead) -> int:
    """Return the number of the version that a head was saved as by a learner; 0 for any other head."""
    learnt = {} if head.provenance is None else head.provenance.training.get(LEARNT, {})
    return int(learnt.get("version", 0))

"""What is learnt from a row that has ended, and which versions of weights have decoded it and drafted for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drafter.drafters.contract import Drafter
from drafter.parts.contract import NewTokens, Room, Row, RowPart
from drafter.target_model.model import BaseModel


@dataclass(frozen=True)
class EndedRow:
    """A row that has just ended, to learn from."""

    request_id: str
    prompt: Several[int]
    output: Several[int]

    @property
    def length(self) -> int:
        """T, tokens of prompt and output."""
        return len(self.prompt) + len(self.output)


class RowTap(Protocol):
    """Receives an engine's ended rows. Both methods are called on the engine's thread and must not wait."""

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        """Return whether to hand out a row whose hidden states take `nbytes` bytes; if not, nothing is copied."""

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        """Take a wanted row, with its hidden states `[T, K · d]` on the CPU; None if the drafter reads none.

        `arrived` happens when they are there; None where they are.
        """


class LearningStart(Protocol):
    """Initial state of a drafter that learns from rows while it drafts."""

    def drafter(self, name: str, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
        """Return a drafter that can learn, by the name that users give; raise `LoadError` if there is none."""

    def tap(self) -> RowTap:
        """Return what collects the rows to learn from."""


Fetch = Callable[[int, int], tuple[Tensor | None, torch.cuda.Event | None]]
"""Sends the hidden states of a slot's first tokens to the host; see `BatchState.fetch_hidden`."""


class LearningPart(RowPart):
    """Notes versions, and gives the tap the row if it may be learned from and its text is the target model's own."""

    def __init__(self, tap: RowTap | None, base: BaseModel, token_bytes: int, fetch: Fetch) -> None:
        self._tap, self._base, self._token_bytes, self._fetch = tap, base, token_bytes, fetch
        self._versions: list[int] = []

    def after_step(self, row: Row, new: NewTokens) -> None:
        if new.drafted and new.version is not None and new.version not in self._versions[-1:]:
            self._versions.append(new.version)

    def leave(self, row: Row, slot: int | None) -> None:
        request = row.handle.request
        over = slot is not None and row.finish_reason is not None
        if self._tap is None or not over or not request.may_teach or row.lenient:
            return
        ended = EndedRow(request.request_id, request.prompt_ids, row.output)
        if self._tap.wants(ended, ended.length * self._token_bytes):
            assert slot is not None
            self._tap.put(ended, *self._fetch(slot, ended.length))

    def result(self, row: Row) -> Mapping[str, Any]:
        return {"drafter_versions": self._versions, "weights_version": self._base.weights_version}


def learning_room(tap: RowTap | None, base: BaseModel, token_bytes: int, fetch: Fetch) -> Room:
    """Return what makes the parts of rows whose hidden states take `token_bytes` a token."""
    return lambda handle: LearningPart(tap, base, token_bytes, fetch)

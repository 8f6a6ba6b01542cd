"""Rows that have ended, handed out with their hidden states to whoever learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter.drafters.contract import Drafter
from drafter.target.model import BaseModel


@dataclass(frozen=True)
class EndedRow:
    """A row that has just ended.

    Args:
        request_id: The caller's name for it.
        prompt: Token ids of the prompt.
        output: Token ids of the output.
        steps: Decode steps that the output took.
    """

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    steps: int

    @property
    def length(self) -> int:
        """T, tokens of prompt and output."""
        return len(self.prompt) + len(self.output)


class RowTap(Protocol):
    """Receives an engine's ended rows. Both methods are called on the engine's thread and must not wait."""

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        """Return whether to hand out a row whose hidden states take `nbytes` bytes; if not, nothing is copied."""

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        """Take a row.

        Args:
            row: A row that is wanted.
            hidden: `[T, K · d]` on the CPU; None if the drafter reads none.
            arrived: Happens when `hidden` is there; None where it is.
        """


class LearningStart(Protocol):
    """Initial state of a drafter that learns from rows while it drafts."""

    def drafter(self, name: str, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
        """Return the drafter, by the name that users give.

        Raises:
            LoadError: The name is not of a drafter that can learn, or it cannot be loaded.
        """

    def tap(self) -> RowTap:
        """Return what collects the rows to learn from."""

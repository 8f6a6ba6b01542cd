"""Interface of parts: what a room adds to a row, which the engine decodes without knowing any room.

A `Room` makes a part for each row that needs one. The row, which is a `Sequence`, calls its parts in the order of the
engine's rooms, on the engine's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from drafter.acceptance.guide import PutOff
from drafter.engine.handle import Handle
from drafter.requests import FinishReason, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.target_model.sight import Borders, Features
from drafter.tree.paths import RowDrafts


class Row(Protocol):
    """What a part sees of its row."""

    handle: Handle
    output: list[int]
    lenient: list[int]  # indices of output that the target model would not have chosen
    counts: DecodeCounts
    finish_reason: FinishReason | None


class NewTokens(NamedTuple):  # of each row and step: a dataclass takes three times as long to make
    """What a step has brought a row: tokens of its output, `accepted` of `drafted` draft tokens among them."""

    tokens: list[int]
    accepted: int
    drafted: int
    logprobs: list[TokenLogprob] | None = None  # of each token, if the row wants them
    version: int | None = None  # of the weights that have drafted


class RowPart:
    """A part of a row. This one adds nothing."""

    apart: bool = False
    """The row's prompt has forwards of its own."""
    alone: bool = False
    """Nothing may be copied for the row from others."""
    waits: bool = False
    """The row's next draft tree passes through the host, which has to know all tokens so far."""
    features: Features | None = None
    """What the target model gets of the prompt in place of its tokens, while it is read."""
    borders: Borders | None = None
    """Where the prompt may be cut; None if everywhere."""

    def enter(self, row: Row, slot: int, tokens: int) -> bool:
        """Do a piece of the work that comes before the row's prompt is read in its `slot`.

        Returns:
            Whether all is done. If not, the piece took about as long as the target model takes to read `tokens`.

        Raises:
            RequestError: The request cannot be decoded.
        """
        return True

    def after_reading(self, start: int, found: list[TokenLogprob]) -> None:
        """Take the log-probabilities of the tokens after place `start` of the row's text, if it wants those."""

    def brought(self, row: Row) -> RowDrafts | None:
        """Return a draft that comes from elsewhere: it is verified in place of a drafter's, whatever a budget plans."""
        return None

    def after_token(self, row: Row) -> Literal["stop", "refused"] | None:
        """Take the newest token of the output: the output ends with it, or may not have it."""

    def after_step(self, row: Row, new: NewTokens) -> None:
        """Take all that a step has brought, once the output and its end are known."""

    def leave(self, row: Row, slot: int | None) -> None:
        """Leave the slot, where all of the row's state still is: it ends, or waits again. None if it had none."""

    def result(self, row: Row) -> Mapping[str, Any]:
        """Return fields of the `Generation` of a row that has ended."""
        return {}


class Steering(RowPart, ABC):
    """A part that says which tokens may come, and so changes what is drafted. A row has at most one."""

    waits = True

    @abstractmethod
    def before_step(self, drafts: RowDrafts, depth: int) -> tuple[RowDrafts, int]:
        """Return which drafts may come, with those that must, no deeper than `depth`; and how many must at the start.

        Those are a chain, and come first.
        """

    @abstractmethod
    def allow(self, mask: Tensor, drafts: RowDrafts, later: PutOff) -> None:
        """Set which tokens may follow the text's end and each draft, in `[1 + N, ceil(V / 32)]` int32 on the host.

        Bit `v % 32` of word `v // 32` stands for token `v`. On a GPU this comes while the target model's forward runs.
        What takes time may be put off to `later`, with that of all rows.
        """

    @abstractmethod
    def problem(self, tokens: int) -> str:
        """Return the message for a row that no token may continue, after so many of its output."""


Room = Callable[[Handle], RowPart | None]
"""Makes the part of a request's row, if it needs one; raises `RequestError` for a request that cannot be decoded."""

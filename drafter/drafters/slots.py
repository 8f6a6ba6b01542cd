"""State of a drafter for each slot: tensors with a position for each token, and Python objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from drafter.drafters.contract import DraftContext, Ids, SlotState
from drafter.requests import Request
from drafter.target_model.cache import Rows, TargetCache

T = TypeVar("T")
NO_TEXT: Ids = np.zeros(0, dtype=np.int64)


class SlotTensors(SlotState):
    """Tensors, such as keys and values, whose entry of a token follows from the text up to it.

    Args:
        kept: A drafter's own tensors, or the cache of a model that it runs.
        usual: Tokens that an ordinary step reads of a row at most.
        behind: Positions that it writes behind the tokens that it has read, at most.

    Attributes:
        known: Tokens of each slot that have been read.
        new: `[B]` tokens of each row that the next step has to read, the pending one at least.
    """

    def __init__(self, kept: Rows | TargetCache, usual: int, behind: int) -> None:
        self._kept, self._usual, self._behind = kept, usual, usual + behind
        self.known = [0] * kept.slots
        self.new = np.zeros(0, dtype=np.int64)

    def enter(self, slot: int, text: Ids, request: Request | None = None) -> None:
        if known := self.known[slot]:
            # The drafter's own numbers may not be finite where the target model's are.
            self._kept.clear(slot, known + self._behind)
        self.known[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        self.known[target] = self._kept.copy(source, target, min(self.known[source], length))

    def move(self, source: int, target: int) -> None:
        self.enter(target, NO_TEXT)
        self.copy(source, target, self.known[source])

    def advance(self, context: DraftContext) -> tuple[Ids, Ids]:
        """Set `new`, and count all tokens of the context as known.

        Returns:
            Rows with more unread tokens than an ordinary step reads, and how many, the pending ones included. These
            are to be read now, and again the pending ones in the step.
        """
        lengths = np.array(context.host_lengths, dtype=np.int64)
        unread = lengths + (context.ahead + 1) - np.array(self.known[: len(lengths)], dtype=np.int64)
        late = unread > self._usual
        self.new = np.where(late, 1, unread.clip(1))
        self.known[: len(lengths)] = (lengths + 1).tolist()
        rows = late.nonzero()[0]
        return rows, unread[rows]


class SlotObjects(SlotState, Generic[T]):
    """A Python object for each sequence.

    Args:
        begin: Makes the object of a text, and its request. An empty slot has that of an empty text, and None.
        end: Called with the object of a sequence that is over.

    Attributes:
        rows: The objects by slot.
    """

    def __init__(
        self, slots: int, begin: Callable[[Ids, Request | None], T], end: Callable[[T], None] = lambda one: None
    ) -> None:
        self._begin, self._end = begin, end
        self.rows = [begin(NO_TEXT, None) for _ in range(slots)]

    def enter(self, slot: int, text: Ids, request: Request | None = None) -> None:
        self._end(self.rows[slot])
        self.rows[slot] = self._begin(text, request)

    def move(self, source: int, target: int) -> None:
        self._end(self.rows[target])
        self.rows[target], self.rows[source] = self.rows[source], self._begin(NO_TEXT, None)

"""Drafts of a row's text that are made elsewhere, in their own time: `Handle.draft` brings them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from drafter.engine.handle import Handle
from drafter.errors import RequestError
from drafter.parts.contract import Room, Row, RowPart
from drafter.tree.paths import RowDrafts, left_behind

_FADING = 0.5
"""Log-probability lost a level: who drafted does not say how probable the tokens are, and their order is kept."""


class DevicePart(RowPart):
    """Has the draft that came last verified in the row's next step, as far as it continues the text by then.

    Args:
        vocabulary: Tokens of the target model.
        nodes: Draft tokens that are verified at most.
    """

    def __init__(self, vocabulary: int, nodes: int) -> None:
        self._vocabulary, self._nodes = vocabulary, nodes
        self._came = deque[tuple[Sequence[int], Sequence[int], int]](maxlen=1)

    def receive(self, tokens: Sequence[int], parents: Sequence[int], at: int) -> None:
        """Take a draft, from any thread; see `Handle.draft`."""
        in_order = len(tokens) == len(parents) and all(-1 <= parent < one for one, parent in enumerate(parents))
        if at < 0 or not in_order or not all(0 <= token < self._vocabulary for token in tokens):
            raise RequestError(
                f"a draft is a list of tokens below {self._vocabulary} and one of their parents, which come before "
                "them or are -1, after a number of output tokens"
            )
        self._came.append((tuple(tokens), tuple(parents), at))

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return bool(self._came)

    def brought(self, row: Row) -> RowDrafts | None:
        if not self._came:
            return None
        tokens, parents, at = self._came.popleft()
        if at > len(row.output) or not (left := left_behind(tokens, parents, row.output[at:], self._nodes)):
            return None
        nodes, above, depths = (list(part) for part in zip(*left[: self._nodes], strict=True))
        return RowDrafts([tokens[node] for node in nodes], above, depths, [-_FADING * depth for depth in depths])


def device_room(vocabulary: int, nodes: int) -> Room:
    """Return what makes the parts of rows for which drafts of up to `nodes` tokens may come."""

    def room(handle: Handle) -> DevicePart:
        part = DevicePart(vocabulary, nodes)
        handle.on_draft = part.receive
        return part

    return room

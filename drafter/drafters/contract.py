"""The contract between the engine and everything that drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from drafter.token_tree import TokenTree


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at: the rows' tokens and hidden states so far. Rows are slots `0..B-1`.

    A row has `lengths` committed tokens (in the base's KV cache) and one pending token after them, so
    `tokens[b, lengths[b]]` is the pending token and `hidden[b, lengths[b] - 1]` the newest hidden state.
    Entries beyond are stale and must not be read.

    Args:
        tokens: `[B, L]` int64 token ids, prompt and output.
        hidden: `[B, L, d]` the base's last hidden states, after its final norm: the LM head's input. None for a
            drafter that does not read it.
        lengths: `[B]` int64 committed tokens a row, on the device.
        host_lengths: `lengths` as the host knows them, so that shapes need no synchronisation.
    """

    tokens: Tensor
    hidden: Tensor | None
    lengths: Tensor
    host_lengths: list[int]

    @property
    def longest(self) -> int:
        """The longest row's committed tokens."""
        return max(self.host_lengths)

    @property
    def pending(self) -> Tensor:
        """`[B]` the pending tokens."""
        return self.tokens.gather(1, self.lengths[:, None])[:, 0]


class Drafter(ABC):
    """Proposes draft trees. It never sees the base's answer and never decides acceptance.

    A drafter that keeps state per slot (a KV cache of its own, say) overrides `allocate`, `admit` and `move`.
    """

    tree_size: int
    """Nodes of the largest trees it proposes, root included."""
    depth: int
    """No proposed node lies deeper."""
    reads_hidden: bool = False
    """Whether it reads `DraftContext.hidden`; the engine keeps hidden states only for drafters that do."""

    @abstractmethod
    def propose(self, context: DraftContext, size: int) -> TokenTree:
        """Trees `[B, size]` for the context's rows, rooted at their pending tokens.

        Args:
            context: The rows so far.
            size: Nodes of each tree, root included: from 2 to `tree_size`.
        """

    def allocate(self, slots: int, length: int) -> None:  # noqa: B027 - stateless drafters have nothing to do
        """Make room for `slots` rows of up to `length` tokens. Called once."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """A new request enters `slot`: forget the one before."""

    def move(self, source: int, target: int) -> None:  # noqa: B027
        """The row of slot `source` goes on in slot `target`."""

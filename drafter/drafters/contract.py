"""The contract between the engine and everything that drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from drafter.tree.token_tree import TokenTree


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
        host_lengths: Of the rows in use, `lengths` as the host knows them, so that nothing need be waited for.
        ahead: Tokens that each row may have more than the host knows of, by a step that is still under way.
        bound: No row in use has more committed tokens, where more are allowed for than there may be; so shapes repeat.
            Rows that are not in use may come behind the others then, as long as a slot is.
        least: What is less probable than this will hardly be verified. Where every path costs time, on a CPU, a search
            need not go on from it.
    """

    tokens: Tensor
    hidden: Tensor | None
    lengths: Tensor
    host_lengths: list[int]
    ahead: int = 0
    bound: int | None = None
    least: float = 0.0

    @property
    def longest(self) -> int:
        """No row in use has more committed tokens."""
        return max(self.host_lengths) + self.ahead if self.bound is None else self.bound

    @property
    def pending(self) -> Tensor:
        """`[B]` the pending tokens."""
        return self.tokens.gather(1, self.lengths[:, None])[:, 0]


class Drafter(ABC):
    """Proposes draft trees. It never sees the base's answer and never decides acceptance.

    A drafter that keeps state per slot (a KV cache of its own, say) overrides the methods from `catch_up` on.
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

        On a GPU this is recorded and repeated: what is done must depend on the tensors, on the number of rows, on
        `context.longest` and on `size` alone, and must not wait for the device.

        Args:
            context: The rows so far.
            size: Nodes of each tree, root included: from 2 to `tree_size`.
        """

    def catch_up(self, context: DraftContext) -> None:  # noqa: B027
        """Comes before each `propose`, with the same rows: the place for what an ordinary step does not need."""

    def allocate(self, slots: int, length: int) -> None:  # noqa: B027 - stateless drafters have nothing to do
        """Make room for `slots` rows of up to `length` tokens. Called once."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """A new request enters `slot`: forget the one before."""

    def move(self, source: int, target: int) -> None:  # noqa: B027
        """The row of slot `source` goes on in slot `target`."""

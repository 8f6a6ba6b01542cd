"""The contract between the engine and everything that drafts.

A drafter proposes draft trees. It never sees the base's answer first and never decides what is accepted, so no drafter
can change a token of an exact verifier's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from drafter.errors import LoadError
from drafter.statistics import StageTimes
from drafter.target.kv_cache import KVCache
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree, root_only

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftSpec:
    """What a drafter can do and what it needs.

    Args:
        max_nodes: Draft nodes of the largest tree it proposes; the root is not counted.
        max_depth: No proposed node lies deeper below the root.
        hidden_layers: Hidden states that it reads in `DraftContext.hidden`, side by side in this order: `LM_HEAD_INPUT`
            is what the LM head reads, `k` is the output of the base's layer `k`, counted from 0. The engine keeps no
            others.
        shared_layers: How many of the base's first layers it runs itself, on the base's own KV cache.
        scratch: Positions behind the committed ones that it writes there at most; a tree's nodes are always allowed.
        graph_safe: Whether `propose` may be recorded as part of a CUDA graph; see there.
        lossless_only: Whether it must not be used with a verifier that is not lossless.
        bounded: Whether `propose` looks at `DraftContext.longest`. If not, one CUDA graph serves texts of any length.
        bytes_per_token: Memory on the base's device that it keeps itself for each position of a slot.
    """

    max_nodes: int
    max_depth: int
    hidden_layers: tuple[int, ...] = ()
    shared_layers: int = 0
    scratch: int = 0
    graph_safe: bool = True
    lossless_only: bool = False
    bounded: bool = True
    bytes_per_token: int = 0


@dataclass(frozen=True)
class Loan:
    """What the engine lends a drafter for as long as both live.

    Args:
        base: The base: its embedding, LM head and layers.
        slots: Sequences that are decoded together at most.
        length: Positions of a slot, draft nodes included.
        cache: The base's KV cache, for a drafter with `shared_layers`; None for others. Committed positions must not be
            written. What lies behind them is free until the next verification.
        times: The engine's stage times: a drafter marks the end of its own stages.
    """

    base: BaseModel
    slots: int
    length: int
    cache: KVCache | None
    times: StageTimes


@dataclass(frozen=True)
class Ask:
    """What a budget wants of a drafter.

    Args:
        nodes: Draft nodes of each row's tree, root not counted.
        least_probability: Less probable prefixes will hardly be verified. Where every path costs time, on a CPU, a
            search may leave them out.
        member: Which of the drafter's `members` is to draft.
    """

    nodes: int
    least_probability: float = 0.0
    member: int = 0


@dataclass(frozen=True)
class Committed:
    """What a step added to the sequences under way.

    Args:
        slots: The slot that each sequence is in by now.
        tokens: The tokens that each of them got, in order.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at: tokens and hidden states of the sequences so far. Row `b` is slot `b`.

    A row has `lengths` committed tokens, whose KV is in the base's cache, and one pending token after them. So
    `tokens[b, lengths[b]]` is the pending token and `hidden[b, lengths[b] - 1]` the newest hidden state. Entries beyond
    are stale and must not be read.

    Args:
        tokens: `[B, L]` int64 token ids, prompt and output.
        hidden: `[B, L, K · d]` the K hidden states that the drafter's spec names; None if it names none.
        lengths: `[B]` int64 committed tokens of each row, on the device.
        host_lengths: `lengths` of the rows in use as the host knows them, so that nothing need be waited for.
        ahead: Tokens that each row may have more than the host knows of, from a step that is still under way.
        bound: No row in use has more committed tokens. It is set where shapes must repeat; rows that are not in use may
            then come behind the others.
    """

    tokens: Tensor
    hidden: Tensor | None
    lengths: Tensor
    host_lengths: list[int]
    ahead: int = 0
    bound: int | None = None

    @property
    def longest(self) -> int:
        """No row in use has more committed tokens."""
        return max(self.host_lengths) + self.ahead if self.bound is None else self.bound

    @property
    def pending(self) -> Tensor:
        """`[B]` the pending tokens."""
        return self.tokens.gather(1, self.lengths[:, None])[:, 0]


@dataclass(frozen=True)
class DraftMemory:
    """What a drafter keeps of texts.

    Args:
        tokens: Tokens that it remembers.
        nbytes: Bytes that its memory takes.
        room: Tokens of texts from elsewhere that `Drafter.remember` is of use for at most; 0 if it drafts from none.
    """

    tokens: int = 0
    nbytes: int = 0
    room: int = 0


@dataclass(frozen=True)
class Renewal:
    """A drafter drafts with other weights from now on.

    Args:
        version: Their number.
        members: Which of the drafter's `members` draft with them; 0 where it is one drafter.
    """

    version: int
    members: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Loading:
    """The use that a drafter is loaded for.

    Args:
        base: The target model.
        nodes: Draft tokens of its largest trees.
        isolated: Whether no text may be drafted from another one.
        loader: Loads a drafter by name, for one that is made of others.
    """

    base: BaseModel
    nodes: int
    isolated: bool
    loader: Callable[[str, Loading], Drafter]

    def load(self, name: str) -> Drafter:
        """Load another drafter for the same use, as a part of one.

        Raises:
            LoadError: There is none of that name, or it would be chosen by a budget, which only a whole drafter can be.
        """
        drafter = self.loader(name, self)
        if drafter.members:
            raise LoadError(f"drafter {name!r} chooses among drafters and cannot be part of another: use it alone")
        return drafter


class Drafter(ABC):
    """Proposes draft trees.

    A drafter without memory implements `propose` alone. The other methods tell one with memory (a KV cache, a table of
    n-grams) what happens to the sequences. They are called on the engine's thread, in the order of events.
    """

    spec: DraftSpec
    members: tuple[str, ...] = ()
    """Names of the drafters among which a budget chooses; none if it is one drafter."""
    drafts: bool = True
    """Whether it has anything to draft with. One that starts without trained weights has not, until it is renewed."""

    @property
    def version(self) -> int | None:
        """Number of the weights that draft now; None where none do, or where they never change."""
        return None

    @property
    def withheld(self) -> tuple[int, ...]:
        """Which of the `members` are not to draft before they are renewed."""
        return ()

    def open(self, loan: Loan) -> None:  # noqa: B027 - a drafter without memory has nothing to do
        """Make room for the loan's slots. Called once, before everything else."""

    def enter(self, slot: int, text: Ids) -> None:  # noqa: B027
        """Forget the sequence that was in `slot`: one with these tokens `[L]` enters, of which nothing is read yet."""

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027
        """Let `target` have what is known of the first `length` tokens in `source`: the two texts begin alike."""

    def move(self, source: int, target: int) -> None:  # noqa: B027
        """Let the sequence in slot `source` go on in slot `target`."""

    def clear(self, slot: int) -> None:  # noqa: B027
        """Set all numbers kept for `slot` to zero: some may not be finite, and would reach the next sequence there."""

    def select(self, member: int) -> None:  # noqa: B027
        """Let this one of the `members` draft from now on. Comes before `prepare`."""

    def prepare(self, context: DraftContext) -> None:  # noqa: B027
        """Do what a step needs beside `propose`, such as reading a new prompt. Comes before each `propose`.

        It is never recorded in a CUDA graph and may depend on what the host knows; it should not wait for the device.
        """

    @abstractmethod
    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]` for the context's rows, rooted at their pending tokens.

        A row may have fewer nodes, or a root alone, behind which comes padding: that row then makes a plain step.

        On a GPU this is recorded and repeated if the spec says `graph_safe`: what is done must depend on the tensors,
        on the number of rows, on `context.longest` and on `ask.nodes` alone, and must not wait for the device.

        Args:
            context: The rows so far.
            ask: How many nodes, from 1 to `spec.max_nodes`.
        """

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Learn from what a step added, whether this drafter proposed it or not. Comes after every step."""

    @property
    def memory(self) -> DraftMemory:
        """What it keeps of texts; may be asked from any thread, after `open`."""
        return DraftMemory()

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:  # noqa: B027
        """Learn from texts that were decoded elsewhere, oldest first. Alone of all methods it may come at any time.

        It is called from any thread, and must not wait for a step.
        """

    def offer(self, number: int, weights: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Get ready to draft with other weights; a drafter whose weights never change has no use for them.

        It is called from any thread but the engine's, and does all there that takes time. Like `remember`, it may come
        at any time.

        Args:
            number: Of the version; one that is not newer than what it has is ignored.
            weights: By name, on the CPU.

        Raises:
            LoadError: They are not such a drafter's, or not finite. Nothing has changed then.
        """

    def renew(self) -> Renewal | None:
        """Draft with the newest weights that were offered, if there are any since. Comes between two steps.

        It must not wait for the device, nor take longer than a small part of a step.
        """
        return None


# ---- `none`: drafts nothing. To verify a lone root is plain decoding, in the same loop as everything else.


class PlainDecoding(Drafter):
    """Proposes trees that are only a root."""

    spec = DraftSpec(max_nodes=0, max_depth=0)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1]`."""
        return root_only(context.pending)

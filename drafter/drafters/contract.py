"""Interface of drafters, and plain decoding.

A drafter proposes draft trees before it sees the target model's answer and never decides what is accepted, so no
drafter can change a token of a lossless verifier's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import Tensor

from drafter.drafters.target import Target
from drafter.errors import LoadError
from drafter.requests import Request
from drafter.statistics import StageTimes
from drafter.target_model.cache import TargetCache
from drafter.tree.token_tree import TokenTree, root_only

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftSpec:
    """Capabilities and needs of a drafter.

    It reads the hidden states `hidden_layers` in `DraftContext.hidden`, concatenated in this order: `LM_HEAD_INPUT`, or
    `k` for the output of layer `k`, counted from 0.
    """

    max_nodes: int  # draft tokens of its largest tree; the root is not counted
    max_depth: int  # largest depth below the root
    hidden_layers: tuple[int, ...] = ()
    graph_safe: bool = True  # `propose` may be captured in a CUDA graph; see there
    bounded: bool = True  # `propose` reads `DraftContext.longest`; if not, one CUDA graph serves texts of any length
    bytes_per_token: int = 0  # memory on the target model's device for each position of a slot
    run: int = 0  # positions that it writes behind a row's text in the target model's own cache; see `Loan.cache`

    @property
    def positions(self) -> int:
        """Positions of the target model's cache that a step writes behind a row's text, at most."""
        return max(self.max_nodes + 1, self.run)

    def beside(self, nodes: int) -> DraftSpec:
        """Return the spec of trees that may also come from elsewhere, with up to `nodes` draft tokens."""
        return replace(self, max_nodes=max(self.max_nodes, nodes), max_depth=max(self.max_depth, nodes))


@dataclass(frozen=True)
class Loan:
    """Resources that the engine lends a drafter for as long as both live."""

    base: Target
    slots: int  # largest batch size
    length: int  # positions of a slot, draft tokens included
    times: StageTimes  # the engine's, in which a drafter marks the end of its own stages
    # The target model's own; None where only drafts are made. What a drafter writes behind a row's text, up to
    # `DraftSpec.run` positions, has to be finite and is overwritten by the step that verifies.
    cache: TargetCache | None = None


@dataclass(frozen=True)
class Ask:
    nodes: int  # draft tokens of each row's tree; the root is not counted
    least_probability: float = 0.0  # on a CPU, where every path costs time, a search may prune prefixes below it
    member: int = 0  # index of the drafter's choices that drafts; see `choices_of`
    shadow: Ask | None = None  # draft that is not verified: the text that follows will show what it was worth
    fixed: bool = False  # the number is no choice: what a guide forces counts, and trees end where their rows do


@dataclass(frozen=True)
class MeasuredWorth:
    """Accepted draft tokens per tree on held-out text, by the number of draft tokens."""

    nodes: tuple[int, ...]  # `[K]`, rising
    accepted: tuple[float, ...]  # `[K]`


@dataclass(frozen=True)
class Committed:
    """Tokens that a step added, by the sequences' present slots."""

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class DraftContext:
    """Tokens and hidden states of the sequences so far. Row `b` is slot `b`.

    `tokens[b, lengths[b]]` is the pending token, after the committed ones, whose KV is in the target model's cache;
    `hidden[b, lengths[b] - 1]` is the newest hidden state. Entries beyond are stale and must not be read.
    """

    tokens: Tensor  # `[B, L]` int64 token ids, prompt and output
    hidden: Tensor | None  # `[B, L, K · d]` the K hidden states that the drafter's spec names; None if it names none
    lengths: Tensor  # `[B]` int64 committed tokens of each row, on the device
    host_lengths: list[int]  # `lengths` of the rows in use as far as the host knows without waiting for the device
    ahead: int = 0  # tokens that each row may have beyond `host_lengths`, from a step that is still running
    # Upper bound of the lengths of rows in use, set where shapes must repeat; unused rows may then follow the others.
    bound: int | None = None
    shift: Tensor | None = None  # `[B]` int64 what images add to positions of the target model's embeddings, if any

    @property
    def longest(self) -> int:
        """Upper bound of the committed tokens of rows in use."""
        return max(self.host_lengths) + self.ahead if self.bound is None else self.bound

    @property
    def pending(self) -> Tensor:
        """`[B]` the pending tokens."""
        return self.tokens.gather(1, self.lengths[:, None])[:, 0]


@dataclass(frozen=True)
class Loading:
    """Context in which a drafter is loaded."""

    base: Target
    nodes: int  # draft tokens of its largest trees
    isolated: bool  # never draft from another request's text
    loader: Callable[[str, Loading], Drafter]  # loads another drafter by name, for composite drafters

    def load(self, name: str) -> Drafter:
        """Load a part of a composite drafter; raise `LoadError` for one that itself chooses among `members`."""
        drafter = self.loader(name, self)
        if drafter.members:
            raise LoadError(f"drafter {name!r} chooses among drafters and cannot be part of another: use it alone")
        return drafter


class SlotState(ABC):
    """State of each slot's sequence: `SlotTensors` or `SlotObjects`, see `drafter.drafters.slots`.

    The batch state copies, moves and clears it with the target model's KV cache.
    """

    @abstractmethod
    def enter(self, slot: int, text: Ids, request: Request | None = None) -> None:
        """Replace the sequence in `slot` by one with tokens `text` `[L]`, none of them read yet, or by none if empty.

        The text is the prompt of `request` and its output so far. Non-finite numbers of the old one must not reach the
        new one.
        """

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027 - objects share nothing
        """Copy the state of the first `length` tokens from slot `source` to `target`: the two share a prefix."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Replace the sequence in slot `target` by the one in `source`."""


class Drafter(ABC):
    """Proposes draft trees. One without state implements `propose` alone.

    Methods are called on the engine's thread, in the order of events.
    """

    spec: DraftSpec
    slots: Sequence[SlotState] = ()
    """State for each slot, allocated in `open`."""
    drafters: tuple[Drafter, ...] = ()
    """Those that it is made of."""
    members: Mapping[str, Drafter] = MappingProxyType({})
    """Those among which a budget chooses, by name; empty for a single drafter. They are opened and told as one."""
    worth: MeasuredWorth | None = None
    """Worth of its trees on held-out text; None where that was not measured."""
    drafts: bool = True
    """False while it must not draft: it started without trained weights."""

    @property
    def version(self) -> int | None:
        """Number of the weights in use; None where there are none or they never change.

        `prepare` and `observe` may replace them.
        """
        return None

    def open(self, loan: Loan) -> None:  # noqa: B027 - a drafter without memory has nothing to do
        """Allocate for the loan's slots. Called once, before everything else."""

    def prepare(self, context: DraftContext) -> None:  # noqa: B027
        """Do a step's work that is not captured in a CUDA graph, such as reading a new prompt, before each `propose`.

        It may depend on host state, and should not wait for the device.
        """

    @abstractmethod
    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]` for the context's rows, rooted at their pending tokens.

        A row may have fewer draft tokens, down to the root alone (a plain step), followed by padding. `ask.nodes` is
        from 1 to `spec.max_nodes`.

        On a GPU this is captured and replayed if `spec.graph_safe`: the operations must depend only on the tensors, the
        number of rows, `context.longest` and `ask.nodes`, and must not wait for the device. Otherwise it drafts on the
        host, from all tokens so far, and no step is under way.
        """

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Learn from the tokens of a step, also where another drafter proposed them. Called after every step."""


def choices_of(drafter: Drafter) -> Mapping[str, Drafter]:
    """Return the drafters among which a budget chooses, by name: a single one has none."""
    return drafter.members or {"": drafter}


def made_of(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all that it is made of: a room finds its own there, to tell it what others need not know."""
    yield drafter
    for part in drafter.drafters:
        yield from made_of(part)


@dataclass(frozen=True)
class MemorySize:
    """Size of a memory of texts; `room` are the most tokens of texts that `TextMemory.remember` can use."""

    tokens: int = 0
    nbytes: int = 0
    room: int = 0


class TextMemory(Drafter):
    """A drafter that keeps texts. Both of these may be called from any thread, once it is open."""

    @property
    @abstractmethod
    def memory(self) -> MemorySize: ...

    @abstractmethod
    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        """Learn from texts decoded elsewhere, oldest first, without blocking."""


class PlainDecoding(Drafter):
    """`none`: proposes only roots, which makes plain decoding, in the same loop as everything else.

    With `nodes`, trees have room for so many draft tokens that a guide forces.
    """

    def __init__(self, nodes: int = 0) -> None:
        self.spec = DraftSpec(max_nodes=nodes, max_depth=nodes)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return root_only(context.pending)

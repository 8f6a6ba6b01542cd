"""Interface of drafters, and plain decoding.

A drafter proposes draft trees before it sees the target model's answer and never decides what is accepted, so no
drafter can change a token of a lossless verifier's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    brought: int = 0  # most draft tokens of a draft that comes from elsewhere and that no budget plans; see `brought`
    run: int = 0  # positions that it writes behind a row's text in the target model's own cache; see `Loan.cache`

    @property
    def largest(self) -> int:
        """Draft tokens of the largest tree, whoever drafts it."""
        return max(self.max_nodes, self.brought)

    @property
    def positions(self) -> int:
        """Positions of the target model's cache that a step writes behind a row's text, at most."""
        return max(self.largest + 1, self.run)


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
    member: int = 0  # index of the drafter's `members` that drafts
    shadow: Ask | None = None  # draft that is not verified: the text that follows will show what it was worth
    brought: tuple[int, ...] = ()  # draft tokens of each row that came from elsewhere; empty where none did
    fixed: bool = False  # the number is no choice: what a guide forces counts, and trees end where their rows do

    @property
    def most(self) -> int:
        """Draft tokens of the largest tree of the step."""
        return max(self.nodes, *self.brought, 0)

    @property
    def own(self) -> Ask:
        """What the drafter itself drafts: nothing where all rows have drafts from elsewhere."""
        return replace(self, nodes=0 if self.brought and 0 not in self.brought else self.nodes, brought=())


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
class DraftMemory:
    """Memory of texts that a drafter keeps; `room` are the most tokens of texts that `Drafter.remember` can use."""

    tokens: int = 0
    nbytes: int = 0
    room: int = 0


@dataclass(frozen=True)
class Renewal:
    """A hot swap of a drafter's weights to a `version`, with which its `members` of these indices draft."""

    version: int
    members: tuple[int, ...] = (0,)


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
    """Proposes draft trees.

    A drafter without state implements `propose` alone. Methods but `remember`, `receive` and `offer` are called on the
    engine's thread, in the order of events.
    """

    spec: DraftSpec
    slots: Sequence[SlotState] = ()
    """State for each slot, allocated in `open`."""
    members: tuple[str, ...] = ()
    """Names of the drafters among which a budget chooses; empty for a single drafter."""
    known: tuple[MeasuredWorth | None, ...] = (None,)
    """Worth of its members' trees, or of its own, on held-out text; None where that was not measured."""
    drafts: bool = True
    """False while it has nothing to draft with: it started without trained weights and waits for a hot swap."""

    @property
    def version(self) -> int | None:
        """Number of the weights in use; None where there are none or they never change."""
        return None

    @property
    def withheld(self) -> tuple[int, ...]:
        """Indices of `members` that must not draft before their weights are renewed."""
        return ()

    def open(self, loan: Loan) -> None:  # noqa: B027 - a drafter without memory has nothing to do
        """Allocate for the loan's slots. Called once, before everything else."""

    def select(self, member: int) -> None:  # noqa: B027
        """Make `members[member]` draft from now on. Called before `prepare`."""

    def follows(self, ask: Ask) -> bool:
        """Return whether the drafter would draft on the host, from all tokens so far: no step may be under way then.

        What it drafts in other steps is captured in a CUDA graph on a GPU.
        """
        return bool(ask.nodes) and not self.spec.graph_safe

    def prepare(self, context: DraftContext) -> None:  # noqa: B027
        """Do a step's work that is not captured in a CUDA graph, such as reading a new prompt, before each `propose`.

        It may depend on host state, and should not wait for the device.
        """

    @abstractmethod
    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]` for the context's rows, rooted at their pending tokens.

        A row may have fewer draft tokens, down to the root alone (a plain step), followed by padding. `ask.nodes` is
        from 1 to `spec.max_nodes`.

        On a GPU this is captured and replayed unless the drafter `follows`: the operations must depend only on the
        tensors, the number of rows, `context.longest` and `ask.nodes`, and must not wait for the device.
        """

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Learn from the tokens of a step, also where another drafter proposed them. Called after every step."""

    @property
    def memory(self) -> DraftMemory:
        """Size of its memory of texts. Safe from any thread, after `open`."""
        return DraftMemory()

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:  # noqa: B027
        """Learn from texts decoded elsewhere, oldest first. Called at any time and from any thread; must not block."""

    def brought(self, rows: int) -> tuple[int, ...]:
        """Return how many draft tokens from elsewhere wait for each of the first slots; empty if none do.

        This comes before a step that `follows`, which verifies all of them, whatever a budget plans.
        """
        return ()

    def with_brought(self, own: TokenTree, counts: tuple[int, ...]) -> TokenTree:
        """Return the drafts of which `brought` has told `counts`, and in other rows the `own` ones of `propose`."""
        return own

    def receive(self, request: Request, tokens: Sequence[int], parents: Sequence[int], at: int) -> None:  # noqa: B027
        """Take a draft that was made elsewhere for one request; see `Handle.draft`. Called like `remember`.

        Drafters that make their own ignore it. `request` is the object that `SlotState.enter` is given.
        """

    def offer(self, number: int, weights: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Prepare a hot swap to other weights; drafters with fixed weights ignore it.

        Called at any time, like `remember`, but never on the engine's thread: do all slow work here.

        Args:
            number: Version; ignored if not newer than the present one.
            weights: By name, on the CPU.

        Raises:
            LoadError: The weights do not fit this drafter or are not finite. The drafter is then unchanged.
        """

    def target_changed(self) -> None:  # noqa: B027
        """Make again, in place, what was derived from the target model, whose weights have changed in place.

        Called between two steps, while no slot has a sequence. A drafter that keeps the old may do so: it only drafts
        worse.
        """

    def renew(self) -> Renewal | None:
        """Swap to the newest offered weights, if any, between two steps: quickly, without waiting for the device."""
        return None


class PlainDecoding(Drafter):
    """`none`: proposes only roots, which makes plain decoding, in the same loop as everything else."""

    spec = DraftSpec(max_nodes=0, max_depth=0)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return root_only(context.pending)

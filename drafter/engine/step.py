"""Outcome of a step: packed on the device into as few tensors as possible, and unpacked on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.acceptance.contract import Accepted, PathLogprobs, Verified, Verifier, are_sound, path_logprobs
from drafter.budget.contract import StepLoad, StepSeconds
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.batch import BatchState
from drafter.engine.sequence import Sequence
from drafter.requests import TokenLogprob
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from drafter.target.packing import Packing
from drafter.tree.token_tree import TokenTree, root_only

_NOT_FINITE = -1
"""Stands for a token that was chosen from logits which are not numbers."""


@dataclass(frozen=True)
class RowOutcomes:
    """A step's outcome of B rows, for the host.

    Args:
        tokens: The tokens each row got: accepted draft tokens and the bonus token; none if it is not sound.
        sound: Whether each row's logits are finite.
        accepted: Draft tokens among the tokens.
        drafted: Draft nodes that were verified in each row.
        log_probs: `[B, N]` float64 log prefix probabilities of the draft nodes, -inf in padding; N may be 0.
        on_path: `[B, N]` bool: whether a draft node was accepted.
        lenient: Places of each row's tokens that the base would not have chosen.
    """

    tokens: list[list[int]]
    sound: list[bool]
    accepted: list[int]
    drafted: list[int]
    log_probs: npt.NDArray[np.float64]
    on_path: npt.NDArray[np.bool_]
    lenient: list[list[int]]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step, packed.

    Args:
        packed: `[B, 2 + 2 (D + 1)]` int64: accepted draft tokens, draft nodes, path and tokens of each row; the token
            alone, `[B, 1]`, where nothing was drafted.
        log_probs: `[B, N]` of the draft nodes.
        logprobs: Log-probabilities of emitted tokens, of the rows that want them; None if none do.
        lenient: `[B, D + 1]` bool: which tokens the base would not have chosen; None where none can be.
    """

    packed: Tensor
    log_probs: Tensor
    logprobs: PathLogprobs | None
    lenient: Tensor | None = None

    @staticmethod
    def pack(tree: TokenTree, accepted: Accepted, sound: Tensor, logprobs: PathLogprobs | None) -> StepOutcome:
        """Pack what came of `tree` `[B, N]`, on the device.

        Args:
            tree: The trees.
            accepted: The paths.
            sound: `[B]` bool: whether all of a row's logits are finite.
            logprobs: As in the class.
        """
        tokens = torch.where(sound[:, None], accepted.tokens, _NOT_FINITE)
        if tree.size == 1:
            return StepOutcome(tokens, tree.log_probs[:, 1:], logprobs)
        drafted = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
        packed = torch.cat([accepted.count[:, None], drafted, accepted.path, tokens], dim=1)
        return StepOutcome(packed, tree.log_probs[:, 1:], logprobs, accepted.lenient)

    def to_host(self, rows: int) -> StepOutcome:
        """The first `rows` rows on the host, once what is queued on the device is done."""
        return StepOutcome(
            self.packed[:rows].to("cpu", non_blocking=True),
            self.log_probs[:rows].to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to_host(),
            None if self.lenient is None else self.lenient[:rows].to("cpu", non_blocking=True),
        )

    def unpack(self) -> RowOutcomes:
        """Read the outcome; it must be on the host."""
        packed = self.packed.numpy()
        rows, width = packed.shape
        if width == 1:
            said = packed.tolist()
            counts, drafted = [0] * rows, [0] * rows
            on_path = np.zeros((rows, 0), dtype=np.bool_)
        else:
            count, nodes, path, tokens = np.split(packed, [1, 2, 2 + (width - 2) // 2], axis=1)
            said, counts, drafted = tokens.tolist(), count[:, 0].tolist(), nodes[:, 0].tolist()
            on_path = np.zeros((rows, 1 + self.log_probs.shape[1]), dtype=np.bool_)
            np.put_along_axis(on_path, path, True, axis=1)
            on_path = on_path[:, 1:]
        sound = [row[0] != _NOT_FINITE for row in said]
        given = [row[: count + 1] if is_sound else [] for row, count, is_sound in zip(said, counts, sound, strict=True)]
        accepted = [count if is_sound else 0 for count, is_sound in zip(counts, sound, strict=True)]
        lenient: list[list[int]] = [[] for _ in given]
        if self.lenient is not None:
            for row, place in zip(*(index.tolist() for index in self.lenient.numpy().nonzero()), strict=True):
                if sound[row]:
                    lenient[row].append(place)
        log_probs = self.log_probs.numpy().astype(np.float64)
        return RowOutcomes(given, sound, accepted, drafted, log_probs, on_path, lenient)

    def read_logprobs(self, wanted: Mapping[int, int], tokens: list[list[int]]) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities of the rows that want them; it must be on the host.

        Args:
            wanted: Row → of how many of the most probable tokens, in the order in which they were asked for.
            tokens: What each row got.
        """
        if self.logprobs is None:
            return {}
        read = self.logprobs.read([tokens[row] for row in wanted], list(wanted.values()))
        return dict(zip(wanted, read, strict=True))


@dataclass
class Step:
    """One step of B rows: what was asked of it, what came of it, and how long it took.

    Args:
        load: What its time follows from.
        ask: What was to be drafted.
        outcome: On the device, or on its way to the host.
        depth: Draft tokens that a row may get at most.
        promised: `[B, ask.nodes]` log prefix probabilities of all drafted nodes, where not all of them are verified.
        seconds: Where the time went; None where the host does not know.
        planned: Whether the budget planned it; not where it came with a prompt's forward.
        sequences: Those of its B rows.
        stays: `Sequence.stay` of each when the step began.
        wanted: Row → of how many of the most probable tokens it wants log-probabilities.
        version: `Drafter.version` of the step.
        landed: Happens when the outcome is on the host; None where it is.
    """

    load: StepLoad
    ask: Ask
    outcome: StepOutcome
    depth: int
    promised: npt.NDArray[np.float64] | None = None
    seconds: StepSeconds | None = None
    planned: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    wanted: dict[int, int] = field(default_factory=dict)
    version: int | None = None
    landed: torch.cuda.Event | None = None

    @property
    def alive(self) -> list[int]:
        """Rows whose sequence is still in the slot of the step; others have ended, or left it, and it has gone on."""
        return [
            row
            for row, (sequence, stay) in enumerate(zip(self.sequences, self.stays, strict=True))
            if not sequence.ended and sequence.stay == stay
        ]


class Flights:
    """Steps that are queued, or done, and whose outcome the host has not read, oldest first.

    Args:
        device: Where steps are done.
        lag: Steps that stay under way on the device while the host reads an older one.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self._device, self.lag = device, lag
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def ahead(self) -> int:
        """Tokens that a sequence may have more than the host knows of."""
        return sum(step.depth + 1 for step in self._steps)

    def add(self, step: Step) -> None:
        """Send a step's outcome to the host, without waiting."""
        if self._device.type == "cuda":
            step.outcome = step.outcome.to_host(len(step.sequences))
            step.landed = torch.cuda.Event(blocking=True)
            step.landed.record(torch.cuda.current_stream(self._device))
        self._steps.append(step)

    def land(self, keep: int) -> Iterator[Step]:
        """Wait for all steps but the newest `keep` ones, oldest first, and hand them out."""
        while len(self._steps) > keep:
            step = self._steps.pop(0)
            if step.landed is not None:
                step.landed.synchronize()
            yield step

    def clear(self) -> None:
        """Forget all steps."""
        self._steps = []


# ---- The stages of a step that the device does: draft, verify, accept, commit. Nothing here waits for it.


class DeviceStep:
    """The stages over the first slots of a batch state.

    Args:
        base: The base model.
        verifier: Decides what is accepted.
        state: What the device holds.
        packs: Whether trees of different sizes are verified without their padding, which needs to know how many nodes
            there are and so waits for the device.
    """

    def __init__(self, base: BaseModel, verifier: Verifier, state: BatchState, *, packs: bool) -> None:
        self.base, self.verifier, self.state, self.packs = base, verifier, state, packs
        self._hidden_layers = (*state.drafter.spec.hidden_layers, *verifier.hidden_layers)
        self._drafter_width = len(state.drafter.spec.hidden_layers) * base.hidden_size

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a lone root where no nodes are asked for."""
        return self.state.drafter.propose(context, ask) if ask.nodes else root_only(context.pending)

    def verify(self, tree: TokenTree, kv_length: int) -> Verified:
        """Run the base over `tree` `[B, N]` of the first B slots, reading `kv_length` cache positions."""
        rows, depth = len(tree.tokens), self._depth(tree)
        ancestors = tree.ancestors(depth)
        packing = Packing.of(tree.tokens >= 0) if self.packs and rows > 1 and tree.size > 1 else None
        nodes = TreeNodes(
            # Padding repeats the root: whatever other token stood there, its numbers might not be finite.
            torch.where(tree.tokens >= 0, tree.tokens, tree.tokens[:, :1]),
            self.state.lengths[:rows],
            tree.depths,
            ancestors,
            kv_length,
            packing,
            self._hidden_layers,
            self.state.max_length,
        )
        logits, hidden = self.base.verify(self.state.cache, nodes)
        if not self.verifier.hidden_layers:
            return Verified(tree, ancestors, depth, logits, hidden)
        ours, read = hidden[..., : self._drafter_width], hidden[..., self._drafter_width :]
        return Verified(tree, ancestors, depth, logits, ours, read)

    def accept(self, verified: Verified, rows: slice) -> StepOutcome:
        """Let the verifier decide on the trees of `rows`, commit the accepted paths, and pack the outcome."""
        state = self.state
        accepted = self.verifier.accept(verified, state.row_sampling(rows))
        logprobs = None
        if wanted := self.wanted_logprobs(rows):
            logprobs = path_logprobs(verified.logits, accepted, list(wanted), max(wanted.values()))
        sound = are_sound(verified.logits)  # one node that is not finite spoils the whole tree
        outcome = StepOutcome.pack(verified.tree, accepted, sound, logprobs)
        state.commit(accepted, verified.hidden, sound, rows)
        return outcome

    def accept_prompt_end(self, slot: int, pending: Tensor, logits: Tensor, hidden: Tensor) -> StepOutcome:
        """A plain step of one slot whose logits come with the forward over its prompt's end.

        Args:
            slot: The slot.
            pending: `[1]` its pending token.
            logits: `[1, 1, V]` after that.
            hidden: `[1, 1, K · d]` of that.
        """
        tree = root_only(pending)
        return self.accept(Verified(tree, tree.ancestors(0), 0, logits, hidden), slice(slot, slot + 1))

    def wanted_logprobs(self, rows: slice) -> dict[int, int]:
        """Return the number of log-probabilities by row, for those of `rows` that want any; indices count from the
        first."""
        return {
            slot - rows.start: count for slot, count in self.state.logprobs.items() if rows.start <= slot < rows.stop
        }

    def _depth(self, tree: TokenTree) -> int:
        return min(self.state.drafter.spec.max_depth, tree.size - 1)

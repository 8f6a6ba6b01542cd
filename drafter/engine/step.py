"""The record of a step, and the stages of a step on the device: draft, verify, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.contract import Accepted, PathLogprobs, Verified, Verifier, are_sound, token_logprobs
from drafter.budget.contract import ScoredTrees, StepLoad, StepObservation, StepSeconds
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.batch import BatchState
from drafter.engine.sequence import Sequence
from drafter.engine.shadows import Shadows
from drafter.requests import TokenLogprob
from drafter.target.attention import Packing
from drafter.target.model import BaseModel
from drafter.target.nodes import TreeNodes
from drafter.tree.token_tree import TokenTree, root_only

_NOT_FINITE = -1  # token chosen from logits that are not numbers


@dataclass(frozen=True)
class StepTensors:
    """Result of a step on the device, in as few tensors as possible.

    `packed` `[B, 2 + 2 (D + 1)]` int64 are number of accepted draft tokens, number of draft nodes, path and tokens of
    each row; the token alone, `[B, 1]`, where nothing was drafted.
    """

    packed: Tensor
    nodes: int  # N, draft nodes of a row's tree
    logprobs: PathLogprobs | None = None  # of emitted tokens, of the rows that want them; None if none do
    lenient: Tensor | None = None  # `[B, D + 1]` bool; see `Accepted`

    def to_host(self, rows: int) -> StepTensors:
        """Copy the first `rows` rows to the host; valid once queued work is done."""
        return StepTensors(
            self.packed[:rows].to("cpu", non_blocking=True),
            self.nodes,
            None if self.logprobs is None else self.logprobs.to_host(),
            None if self.lenient is None else self.lenient[:rows].to("cpu", non_blocking=True),
        )


@dataclass(eq=False)
class Step:
    """One step of B rows: what was asked, drafted and accepted, and how long it took."""

    sequences: list[Sequence]  # of the B rows
    load: StepLoad  # factors of its time
    ask: Ask  # request to the drafter
    depth: int  # draft tokens that a row may get at most
    wanted: dict[int, int]  # row → number of most probable tokens whose log-probabilities it wants
    version: int | None  # of the drafter's weights
    planned: bool = True  # the budget planned it, as it does not for the step that comes with a prompt's forward
    since: float = field(default_factory=time.perf_counter)  # when its present part began, on the host's clock
    reading: float = 0.0  # seconds of the drafter's prefill
    drafting: float = 0.0  # seconds of the draft
    rest: float | None = None  # seconds of all else; None where the host does not know
    shadow: StepSeconds | None = None  # of a shadow draft, beside these; None without one
    stays: list[int] = field(init=False)  # `Sequence.stay` of each row at the start
    tensors: StepTensors = field(init=False)  # the result, on the device or on its way to the host
    landed: torch.cuda.Event | None = None  # happens when `tensors` are on the host; None where they are
    # The rest is set by `read`. New tokens of each row: accepted draft tokens and the bonus token; none if not sound.
    tokens: list[list[int]] = field(init=False)
    sound: list[bool] = field(init=False)  # rows whose logits are finite
    accepted: list[int] = field(init=False)  # draft tokens among `tokens`
    drafted: list[int] = field(init=False)  # draft nodes that were verified
    on_path: npt.NDArray[np.bool_] = field(init=False)  # `[B, N]` draft nodes that were accepted
    lenient: list[list[int]] = field(init=False)  # indices of tokens that the target model would not have chosen
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # by row, if wanted

    def __post_init__(self) -> None:
        self.stays = [sequence.stay for sequence in self.sequences]

    @property
    def alive(self) -> list[int]:
        """Rows whose sequence is still in the slot of the step; the others have ended or left it."""
        return [
            row
            for row, (sequence, stay) in enumerate(zip(self.sequences, self.stays, strict=True))
            if not sequence.ended and sequence.stay == stay
        ]

    def lap(self) -> float:
        """Begin the next part of the step; return the seconds of the last one."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def read(self) -> None:
        """Unpack the result, which must be on the host."""
        packed, nodes = self.tensors.packed.numpy(), self.tensors.nodes
        rows, width = packed.shape
        self.on_path = np.zeros((rows, nodes), dtype=np.bool_)
        counts = self.drafted = [0] * rows
        chosen = packed
        if width > 1:
            path, chosen = packed[:, 2 : 1 + width // 2], packed[:, 1 + width // 2 :]
            counts, self.drafted = packed[:, 0].tolist(), packed[:, 1].tolist()
            with_root = np.zeros((rows, 1 + nodes), dtype=np.bool_)
            with_root[np.arange(rows)[:, None], path] = True
            self.on_path = with_root[:, 1:]
        self.sound = (chosen[:, 0] != _NOT_FINITE).tolist()
        self.accepted = [count if sound else 0 for count, sound in zip(counts, self.sound, strict=True)]
        self.tokens = [
            row[: count + 1] if sound else []
            for row, count, sound in zip(chosen.tolist(), counts, self.sound, strict=True)
        ]
        self.lenient = [[] for _ in range(rows)]
        if self.tensors.lenient is not None:
            for row, index in self.tensors.lenient.nonzero().tolist():
                if self.sound[row]:
                    self.lenient[row].append(index)
        if self.tensors.logprobs is not None:
            wanted = [self.tokens[row] for row in self.wanted]
            found = self.tensors.logprobs.read(wanted, list(self.wanted.values()))
            self.logprobs = dict(zip(self.wanted, found, strict=True))

    def observation(self, emitted: dict[int, int], shadows: Shadows) -> StepObservation | None:
        """Return what a budget learns from, of new tokens by row `emitted`; None if there is nothing to learn."""
        rows = [row for row in emitted if self.sound[row]]
        if not self.planned or not rows:
            return None
        load, trees = StepLoad(len(rows), self.load.length, self.load.choosing), None
        if self.ask.nodes:
            accepted = np.zeros((len(rows), self.ask.nodes), np.bool_)
            accepted[:, : self.on_path.shape[1]] = self.on_path[rows]
            trees = ScoredTrees(self.ask.member, np.array(self.drafted)[rows], accepted)
        seconds = None if self.rest is None else StepSeconds(self.reading, self.drafting, self.rest)
        tokens = sum(emitted[row] for row in rows)
        return StepObservation(load, self.ask, tokens, trees, seconds, self.shadow, shadows.scored())


class Flights:
    """Steps whose result the host has not read, oldest first.

    `lag` of them stay under way on the device while the host reads an older one.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self._device, self.lag = device, lag
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def ahead(self) -> int:
        """Tokens that a sequence may have beyond those that the host knows."""
        return sum(step.depth + 1 for step in self._steps)

    def add(self, step: Step) -> None:
        """Send the step's result to the host, without waiting."""
        if self._device.type == "cuda":
            step.tensors = step.tensors.to_host(len(step.sequences))
            step.landed = torch.cuda.Event(blocking=True)
            step.landed.record(torch.cuda.current_stream(self._device))
        self._steps.append(step)

    def land(self, keep: int) -> Iterator[Step]:
        """Wait for all steps but the newest `keep` ones, and yield them."""
        while len(self._steps) > keep:
            step = self._steps.pop(0)
            if step.landed is not None:
                step.landed.synchronize()
            yield step

    def clear(self) -> None:
        self._steps = []


class DeviceStep:
    """The stages over the first slots of a batch state. None of them waits for the device.

    If it `packs`, trees of different sizes are verified without padding, which needs the number of nodes on the host.
    """

    def __init__(self, base: BaseModel, verifier: Verifier, state: BatchState, *, packs: bool) -> None:
        self.base, self.verifier, self.state, self.packs = base, verifier, state, packs
        self._hidden_layers = (*state.drafter.spec.hidden_layers, *verifier.hidden_layers)
        self._drafter_width = len(state.drafter.spec.hidden_layers) * base.hidden_size

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]`."""
        return self.state.drafter.propose(context, ask) if ask.nodes else root_only(context.pending)

    def verify(self, tree: TokenTree, kv_length: int) -> Verified:
        """Run the target model over `tree` `[B, N]` of the first B slots, reading `kv_length` cache positions."""
        rows, depth = len(tree.tokens), min(self.state.drafter.spec.max_depth, tree.size - 1)
        ancestors, lengths = tree.ancestors(depth), self.state.lengths[:rows]
        packing = Packing.of(tree.tokens >= 0) if self.packs and rows > 1 and tree.size > 1 else None
        nodes = TreeNodes(
            # Padding repeats the root: another token's numbers might not be finite.
            tokens=torch.where(tree.tokens >= 0, tree.tokens, tree.tokens[:, :1]),
            lengths=lengths,
            positions=lengths[:, None] + tree.depths,
            kv_length=kv_length,
            packing=packing,
            hidden_layers=self._hidden_layers,
            parents=tree.parents,
            ancestors=ancestors,
            full=self.state.max_length,
        )
        logits, hidden = self.base.verify(self.state.cache, nodes)
        if not self.verifier.hidden_layers:
            return Verified(tree, ancestors, depth, logits, hidden)
        ours, read = hidden[..., : self._drafter_width], hidden[..., self._drafter_width :]
        return Verified(tree, ancestors, depth, logits, ours, read)

    def accept(self, verified: Verified, rows: slice) -> Accepted:
        """Let the verifier decide on the trees of slots `rows`."""
        return self.verifier.accept(verified, self.state.row_sampling(rows))

    def commit(self, verified: Verified, accepted: Accepted, rows: slice) -> StepTensors:
        """Commit the accepted paths of slots `rows`, and pack the result."""
        tree, logprobs = verified.tree, None
        if wanted := self.state.wanted_logprobs(rows):
            row = devices.send(torch.tensor(list(wanted)), self.base.device)
            at_path = verified.logits[row[:, None], accepted.path[row]]
            logprobs = token_logprobs(at_path, accepted.tokens[row], max(wanted.values()))
        # One node that is not finite spoils the whole tree.
        sound = are_sound(verified.logits) if accepted.sound is None else accepted.sound
        packed, lenient = torch.where(sound[:, None], accepted.tokens, _NOT_FINITE), None
        if tree.size > 1:
            drafted = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
            packed = torch.cat([accepted.count[:, None], drafted, accepted.path, packed], dim=1)
            lenient = accepted.lenient
        self.state.commit(accepted, verified.hidden, sound, rows)
        return StepTensors(packed, tree.size - 1, logprobs, lenient)

"""The plan of a step and what came out of it, and the stages of a step on the device: draft, verify, finish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.acceptance.choices import NodeChoices, are_sound
from drafter.acceptance.contract import PathLogprobs, Verified, Verifier, token_logprobs
from drafter.budget.contract import ScoredTrees, StepObservation, StepSeconds
from drafter.drafters.contract import Ask, DraftContext, choices_of
from drafter.engine.batch import BatchState
from drafter.engine.sequence import Handling, Sequence
from drafter.engine.shadows import Shadows
from drafter.parts.contract import NewTokens, Steering
from drafter.requests import TokenLogprob
from drafter.target_model.attention import Packing
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.paths import RowDrafts
from drafter.tree.token_tree import TokenTree, root_only

_NOT_FINITE = -1  # token chosen from logits that are not numbers
Wanted = Mapping[int, tuple[int, bool]]
"""Log-probabilities by row: with how many of the most probable tokens, and whether as `Request.drawn_logprobs`."""
NOTHING: Wanted = MappingProxyType({})


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

    @property
    def path(self) -> Tensor:
        """`[B, D + 1]` node ids; entries past an accepted path are 0."""
        width = self.packed.shape[1]
        return self.packed[:, 2 : 1 + width // 2] if width > 1 else torch.zeros_like(self.packed)

    @property
    def tokens(self) -> Tensor:
        """`[B, D + 1]` tokens along the path; -1 in a row that is not sound."""
        width = self.packed.shape[1]
        return self.packed[:, 1 + width // 2 :] if width > 1 else self.packed

    def to_host(self, rows: int) -> StepTensors:
        """Copy the first `rows` rows to the host; valid once queued work is done."""
        return StepTensors(
            self.packed[:rows].to("cpu", non_blocking=True),
            self.nodes,
            None if self.logprobs is None else self.logprobs.to_host(),
            None if self.lenient is None else self.lenient[:rows].to("cpu", non_blocking=True),
        )


@dataclass
class Clock:
    """Times the parts of a step, in seconds: on the host, or on a `device` that works behind it."""

    since: float = field(default_factory=time.perf_counter)  # when the present part began
    reading: float = 0.0  # the drafter's prefill
    drafting: float = 0.0
    rest: float | None = None  # all else; None until it is known
    device: devices.DeviceTimer | None = None  # None where the host waits for the step
    shadow: StepSeconds | None = None  # a shadow draft, beside these; None without one
    usual: bool = True  # later steps like this one take as long

    def lap(self) -> float:
        """Begin the next part; return the seconds of the last one."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def on_device(self, part: str) -> AbstractContextManager[None]:
        """Return a `with` block for a part that the device does: `drafting`, or another name for the rest."""
        return nullcontext() if self.device is None else self.device.part(part)

    def landed(self) -> None:
        """Note that the host, which has waited for the step, has handed out its result."""
        if self.rest is None:
            self.rest = self.lap()

    def seconds(self) -> StepSeconds | None:
        """Return the times of a step that has landed; None if they tell nothing of later ones."""
        if self.usual and self.device is not None:
            drafting = self.device.seconds("drafting")
            return StepSeconds(0.0, drafting, self.device.seconds() - drafting)
        return StepSeconds(self.reading, self.drafting, self.rest) if self.usual and self.rest is not None else None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All that is decided about a step of B rows, in slots from `slot` on, before any of it runs."""

    sequences: list[Sequence]
    slot: int
    context: DraftContext | None  # what is drafted from; None for a prompt's step, which no budget plans
    ask: Ask
    depth: int  # of the deepest draft token that a row may get
    deepest: list[int]  # the same of each row
    wanted: Wanted
    stays: list[int]  # of the sequences
    brought: Several[RowDrafts | None]  # `[B]` what rows have from elsewhere, in place of a draft
    follows: bool = True  # it needs what the host knows of all texts, so that no step may be under way before

    @staticmethod
    def of(
        sequences: list[Sequence],
        slot: int,
        state: BatchState,
        ask: Ask,
        context: DraftContext | None = None,
        useful: Several[int] | None = None,
        *,
        follows: bool = True,
        brought: Several[RowDrafts | None] | None = None,
    ) -> StepPlan:
        """Plan a step whose trees go no deeper than is `useful` `[B]`, where that is known."""
        depth = min(ask.nodes, state.drafter.spec.max_depth)
        deepest = [min(depth, most) for most in useful or [depth] * len(sequences)]
        for row, sequence in enumerate(sequences):
            if sequence.handling is Handling.PLAIN:
                deepest[row] = 0
        wanted = {
            row: (top, one.handle.request.drawn_logprobs)
            for row, one in enumerate(sequences)
            if (top := one.sampling.logprobs) is not None
        }
        stays = [sequence.stay for sequence in sequences]
        brought = brought or [None] * len(sequences)
        return StepPlan(sequences, slot, context, ask, depth, deepest, wanted, stays, brought, follows)

    @property
    def rows(self) -> slice:
        return slice(self.slot, self.slot + len(self.sequences))

    @property
    def steering(self) -> list[Steering | None]:
        """`[B]` what says which tokens may come."""
        return [sequence.steering for sequence in self.sequences]

    @property
    def drafted_steering(self) -> list[Steering | None]:
        """`[B]` the same, of rows that may have drafts."""
        return [None if one.handling is Handling.PLAIN else one.steering for one in self.sequences]


@dataclass(frozen=True, eq=False)
class Step:
    """A step that has been done, or is under way on the device."""

    plan: StepPlan
    clock: Clock
    version: int | None  # of the weights that have drafted
    forced: list[int]  # draft tokens at the start of each row's tree that must come; nobody drafted them

    @property
    def alive(self) -> list[int]:
        """Rows whose sequence is still in the slot of the step; the others have ended or left it."""
        return [
            row
            for row, (sequence, stay) in enumerate(zip(self.plan.sequences, self.plan.stays, strict=True))
            if not sequence.ended and sequence.stay == stay
        ]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out of a step: new tokens of each row, accepted draft tokens and the bonus token; none if not sound."""

    step: Step
    tokens: list[list[int]]
    sound: list[bool]  # rows whose logits are finite
    accepted: list[int]  # draft tokens among `tokens`
    drafted: list[int]  # draft nodes that were verified
    on_path: npt.NDArray[np.bool_]  # `[B, N]` draft nodes that were accepted
    lenient: list[list[int]]  # indices of tokens that the target model would not have chosen
    logprobs: dict[int, list[TokenLogprob]]  # by row, if wanted

    @staticmethod
    def read(step: Step, tensors: StepTensors) -> Outcome:
        """Unpack a step's result, which must be on the host."""
        packed, nodes = tensors.packed.numpy(), tensors.nodes
        rows, width = packed.shape
        on_path = np.zeros((rows, nodes), dtype=np.bool_)
        counts = drafted = [0] * rows
        chosen = tensors.tokens.numpy()
        if width > 1:
            counts, drafted = packed[:, 0].tolist(), packed[:, 1].tolist()
            with_root = np.zeros((rows, 1 + nodes), dtype=np.bool_)
            with_root[np.arange(rows)[:, None], tensors.path.numpy()] = True
            on_path = with_root[:, 1:]
        sound = (chosen[:, 0] != _NOT_FINITE).tolist()
        accepted = [count if fine else 0 for count, fine in zip(counts, sound, strict=True)]
        tokens = [
            row[: count + 1] if fine else [] for row, count, fine in zip(chosen.tolist(), counts, sound, strict=True)
        ]
        lenient: list[list[int]] = [[] for _ in range(rows)]
        if tensors.lenient is not None:
            for row, index in tensors.lenient.nonzero().tolist():
                if sound[row]:
                    lenient[row].append(index)
        logprobs: dict[int, list[TokenLogprob]] = {}
        wanted = step.plan.wanted
        if tensors.logprobs is not None:
            found = tensors.logprobs.read([tokens[row] for row in wanted], [top for top, _ in wanted.values()])
            logprobs = dict(zip(wanted, found, strict=True))
        return Outcome(step, tokens, sound, accepted, drafted, on_path, lenient, logprobs)

    def hand_out(self, row: int) -> int:
        """Give a row's sequence its tokens; return how many it takes."""
        logprobs, version = self.logprobs.get(row), self.step.version
        new = NewTokens(self.tokens[row], self.accepted[row], self.drafted[row], logprobs, version)
        return self.step.plan.sequences[row].take(new, self.lenient[row])

    def observation(self, emitted: dict[int, int], shadows: Shadows) -> StepObservation | None:
        """Return what a budget learns from, of new tokens by row `emitted`; None if there is nothing to learn."""
        plan, clock, forced = self.step.plan, self.step.clock, self.step.forced
        # A budget learns nothing of drafts that it did not plan, and of a step with any the time is not its own.
        rows = [row for row in emitted if self.sound[row] and plan.brought[row] is None]
        if plan.context is None or not rows:
            return None
        ask, trees = plan.ask, None
        if ask.nodes:
            accepted = np.zeros((len(rows), ask.nodes), np.bool_)
            for place, row in enumerate(rows):
                own = self.on_path[row, forced[row] :][: ask.nodes]
                accepted[place, : len(own)] = own
            drafted = np.array([self.drafted[row] - forced[row] for row in rows])
            trees = ScoredTrees(ask.member, drafted, accepted)
        seconds = None if any(forced) or any(plan.brought) else clock.seconds()
        tokens = sum(emitted[row] for row in rows)
        return StepObservation(len(rows), ask, tokens, trees, seconds, clock.shadow, shadows.scored())


class Flights:
    """Steps whose result the host has not read, oldest first.

    `lag` of them stay under way on the device while the host reads an older one.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self._device, self.lag = device, lag
        self._under_way: list[tuple[Step, StepTensors, torch.cuda.Event | None]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def ahead(self) -> int:
        """Tokens that a sequence may have beyond those that the host knows."""
        return sum(step.plan.depth + 1 for step, _, _ in self._under_way)

    def add(self, step: Step, tensors: StepTensors) -> None:
        """Send a step's result to the host, without waiting."""
        arrived = None
        if self._device.type == "cuda":
            tensors = tensors.to_host(len(step.plan.sequences))
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(torch.cuda.current_stream(self._device))
        self._under_way.append((step, tensors, arrived))

    def land(self, keep: int) -> Iterator[tuple[Step, StepTensors]]:
        """Wait for all steps but the newest `keep` ones, and yield them with their results on the host."""
        while len(self._under_way) > keep:
            step, tensors, arrived = self._under_way.pop(0)
            if arrived is not None:
                arrived.synchronize()
            yield step, tensors

    def clear(self) -> None:
        self._under_way = []


class Stages(Protocol):
    """Stages of a step; see `DeviceStep`. What `verify` returns is for `finish` alone."""

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree: ...

    def verify(self, tree: TokenTree, kv_length: int) -> Any: ...

    def finish(self, verified: Any, rows: slice, wanted: Wanted = ..., allowed: Tensor | None = ...) -> StepTensors: ...


class DeviceStep:
    """The stages over the first slots of a batch state. None of them waits for the device.

    If it `packs`, trees of different sizes are verified without padding, which needs the number of nodes on the host.
    """

    def __init__(self, base: BaseModel, verifier: Verifier, state: BatchState, *, packs: bool) -> None:
        self.base, self.verifier, self.state, self.packs = base, verifier, state, packs
        self._hidden_layers = (*state.drafter.spec.hidden_layers, *verifier.hidden_layers)
        self._drafter_width = len(state.drafter.spec.hidden_layers) * base.hidden_size
        self.choices = list(choices_of(state.drafter).values())

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]`."""
        return self.choices[ask.member].propose(context, ask) if ask.nodes else root_only(context.pending)

    def verify(self, tree: TokenTree, kv_length: int) -> Verified:
        """Run the target model over `tree` `[B, N]` of the first B slots, reading `kv_length` cache positions."""
        rows, depth = len(tree.tokens), min(self.state.spec.max_depth, tree.size - 1)
        ancestors, lengths = tree.ancestors(depth), self.state.lengths[:rows]
        packing = Packing.of(tree.tokens >= 0) if self.packs and rows > 1 and tree.size > 1 else None
        nodes = TreeNodes(
            # Padding repeats the root: another token's numbers might not be finite.
            tokens=torch.where(tree.tokens >= 0, tree.tokens, tree.tokens[:, :1]),
            lengths=lengths,
            positions=lengths[:, None] + tree.depths,
            shift=self.state.shift_of(slice(0, rows)),
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

    def finish(
        self, verified: Verified, rows: slice, wanted: Wanted = NOTHING, allowed: Tensor | None = None
    ) -> StepTensors:
        """Let the verifier decide on the trees of slots `rows`, commit the accepted paths, and pack the result.

        Args:
            wanted: Log-probabilities by row.
            allowed: What may follow the first nodes of each tree, on the host; see `masks`.
        """
        tree, logprobs = verified.tree, None
        if allowed is not None:
            missing = (0, 0, 0, tree.size - allowed.shape[1], 0, len(tree.tokens) - len(allowed))
            allowed = F.pad(devices.send(allowed, tree.tokens.device), missing, value=-1)
            verified = replace(verified, allowed=allowed)
        sampling = self.state.row_sampling(rows)
        accepted = self.verifier.accept(verified, sampling)
        if wanted:
            choices = verified.choices(sampling) if wants_drawn(wanted) else None
            logprobs = wanted_logprobs(verified.logits, accepted.path, accepted.tokens, wanted, choices)
        # One node that is not finite spoils the whole tree.
        sound = are_sound(verified.logits) if accepted.sound is None else accepted.sound
        packed, lenient = torch.where(sound[:, None], accepted.tokens, _NOT_FINITE), None
        if tree.size > 1:
            drafted = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
            packed = torch.cat([accepted.count[:, None], drafted, accepted.path, packed], dim=1)
            lenient = accepted.lenient
        self.state.commit(accepted, verified.hidden, sound, rows)
        return StepTensors(packed, tree.size - 1, logprobs, lenient)


def wants_drawn(wanted: Wanted) -> bool:
    """Return whether a row wants log-probabilities of what its tokens are drawn from."""
    return any(as_drawn for _, as_drawn in wanted.values())


def wanted_logprobs(
    logits: Tensor, path: Tensor, tokens: Tensor, wanted: Wanted, choices: NodeChoices | None = None
) -> PathLogprobs:
    """Return log-probabilities along the paths `[B, D + 1]` of the rows that want them.

    `logits` `[B, N, V]` are by node id, `tokens` `[B, D + 1]` those that were chosen. `choices` are what these were
    drawn from, for rows that want to know it: as it was before the tokens were committed.
    """
    row = devices.send(torch.tensor(list(wanted)), logits.device)
    path = path[row]
    at_path = logits[row[:, None], path]
    if choices is not None and (drawn := [place for place, (_, as_drawn) in enumerate(wanted.values()) if as_drawn]):
        some = devices.send(torch.tensor(drawn), logits.device)
        nodes = row[some][:, None].expand_as(path[some]).flatten(), path[some].flatten()
        found = choices.log_probs(*nodes).float().view(len(drawn), *at_path.shape[1:])
        at_path = at_path.float().index_copy(0, some, found)
    return token_logprobs(at_path, tokens[row], max(top for top, _ in wanted.values()))

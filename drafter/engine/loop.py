"""Continuous batching with tree speculative decoding: one loop over slots.

A step reads: admit → draft → slice → verify → walk → commit → retire. Requests enter and leave independently; rows
of different lengths and settings share a batch. Active rows always fill slots `0..B-1`, so that a forward over them
is a view of the buffers.

On a CPU the host reads the tree's prices before the verification, to choose its size, and the walk's outcome after it.
On a GPU a step is queued as a whole (`StepGraphs`), and its outcome is read while the next one runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from drafter.base.causal_lm import BaseModel
from drafter.budget.adaptive import AdaptiveBudget, Budget, Cut, FixedBudget
from drafter.drafters.contract import DraftContext, Drafter
from drafter.engine.batch_state import Rows, Verdict, report
from drafter.engine.cuda_graphs import StepReport, step_graphs
from drafter.engine.engine_config import EngineConfig
from drafter.engine.handle import Handle
from drafter.engine.sequence import Ids, Slot
from drafter.engine.stage_times import StageTimes
from drafter.engine.waiting_queue import WaitingQueue
from drafter.engine.warm_up import compile_base, measure_steps
from drafter.errors import EngineError, LoadError, RequestError
from drafter.requests import Request, TokenLogprob
from drafter.statistics import EngineState
from drafter.tree.token_tree import TokenTree, root_only

_DEFAULT_MAX_LENGTH = 2048
_PREFILL_CHUNK = 512
"""Prompt tokens of one forward, and about as many a step takes on while somebody watches a row's tokens come."""
_LEAST_SHARED = 8
"""Shorter common beginnings of prompts are computed again: that costs no more than to copy them."""


@dataclass(frozen=True)
class Flight:
    """A step that is queued, or done, and whose outcome the host has not looked at.

    Args:
        slots: The B rows' requests.
        nodes: Draft nodes of each row.
        most: Tokens that a row may get.
        report: Its tensors, on the host.
        wanted: Rows that asked for log-probabilities, and for how many of the most probable tokens.
        landed: Happens when the report is there; None where it is.
    """

    slots: list[Slot]
    nodes: int
    most: int
    report: StepReport
    wanted: dict[int, int]
    landed: torch.cuda.Event | None


class Engine:
    """The decoding loop. `submit`, `state` and `Handle.cancel` may be called from any thread, `step` from one.

    Args:
        base: The base model.
        drafter: Proposes trees.
        tokenizer: Of the base; decodes texts and stop strings.
        config: Sizes.

    Attributes:
        rows: What it decodes, as the device has it.
        last_step: When it last gave a sign of life, in monotonic seconds: if it is not idle and this is long ago, it
            hangs.

    Raises:
        LoadError: `max_length` is more than the base has positions, or the base cannot be compiled.
    """

    def __init__(self, base: BaseModel, drafter: Drafter, tokenizer: Any, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.base, self.drafter, self.tokenizer, self.config = base, drafter, tokenizer, config
        limit = base.max_positions or _DEFAULT_MAX_LENGTH
        if config.max_length is not None and config.max_length > limit:
            raise LoadError(f"max_length {config.max_length} is more than the {limit} positions of {base.name}")
        self.max_length = config.max_length or min(limit, _DEFAULT_MAX_LENGTH)
        self._graphs = step_graphs(base.device, base.devices)
        # A step that is repeated as a whole always has the same nodes.
        self.rows = Rows(base, drafter, config.slots, self.max_length, packs=self._graphs is None)
        self._flights: list[Flight] = []
        self._slots: list[Slot] = []
        # Requests that are being prefilled, in the slots behind the active rows.
        self._entering: list[Slot] = []
        self._waiting = WaitingQueue(config.max_queue)
        self._most = config.slots  # requests may be in slots together; fewer after memory ran out
        self._times = StageTimes()
        self._steps = self._row_steps = self._preemptions = 0
        self._output_tokens = self._draft_tokens = self._accepted_tokens = 0
        self._prefilled_tokens = self._shared_tokens = self._read_before = 0
        self.last_step = time.monotonic()
        if config.compile:
            compile_base(self.rows)
        self._budget: Budget = FixedBudget(0)
        if drafter.tree_size > 1:
            fixed = config.nodes
            self._budget = (
                FixedBudget(fixed)
                if fixed != "auto"
                else AdaptiveBudget(measure_steps(self.rows, self._graphs), self._cut)
            )

    # ---- from any thread

    def submit(self, request: Request, *, stream: bool = False) -> Handle:
        """Queue a request.

        Raises:
            RequestError: The prompt is empty, too long, or not of token ids in the vocabulary.
            QueueFullError: `max_queue` requests are waiting.
            EngineError: The engine has failed before.
        """
        self._refuse_unusable(request)
        handle = Handle(request, stream=stream, on_cancel=self._waiting.look_again)
        if self.idle:
            self.last_step = time.monotonic()
        self._waiting.put(self._new_slot(handle))
        return handle

    def state(self) -> EngineState:
        """What it is doing and has done. Figures may be a step apart."""
        return EngineState(
            active=len(self._in_slots()),
            waiting=len(self._waiting),
            slots=self._most,
            steps=self._steps,
            row_steps=self._row_steps,
            output_tokens=self._output_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            prefilled_tokens=self._prefilled_tokens,
            shared_tokens=self._shared_tokens,
            preemptions=self._preemptions,
            stage_seconds=dict(self._times.seconds),
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to decode and nothing waiting."""
        return not self._in_slots() and not self._flights and not self._waiting

    @property
    def failure(self) -> EngineError | None:
        """Why it decodes no more; None while it does."""
        return self._waiting.closed

    @property
    def active(self) -> int:
        """Requests being decoded."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache."""
        return self.rows.cache.nbytes

    def fail(self, error: BaseException) -> None:
        """End every request with `error`; later ones are refused."""
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        slots = [*self._in_slots(), *self._waiting.close(failure)]
        self._slots, self._entering, self._flights = [], [], []
        for slot in slots:
            slot.handle.future.set_exception(failure)

    # ---- the loop

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one step of every active request; requests that wait enter free slots.

        When the device's memory runs out, half of the rows are taken out and decoded later. A row whose memory is not
        enough even when it is alone is an error like any other.
        """
        self.last_step = time.monotonic()
        self._times.start()
        self._read_before = self._prefilled_tokens
        if not self._fits():
            self._preempt()
        self._times.mark("host")
        self.last_step = time.monotonic()

    def _fits(self) -> bool:
        """Do the step, and say whether the device's memory was enough for it."""
        try:
            self._drop_unwanted()
            self._admit()
            if self._slots:
                self._decode()
            else:
                self._settle(0)
        except torch.OutOfMemoryError:
            if len(self._in_slots()) <= 1:
                raise
            return False  # and only then go on: the error's traceback holds the step's tensors
        return True

    def _decode(self) -> None:
        rows, begun = len(self._slots), time.perf_counter()
        nodes = min(self._budget.draft(rows), self.drafter.tree_size - 1)
        if self._graphs is None:
            self._decode_by_stages(rows, nodes, begun)
        else:
            self._queue(rows, nodes)

    def _decode_by_stages(self, rows: int, nodes: int, begun: float) -> None:
        """Draft `nodes` nodes, verify as many of them as seem worth it, and look at what came of it.

        The step began to be thought about at `begun`, in seconds: that, too, is what drafting costs.
        """
        context = self._context(rows, self._budget.least)
        self._times.mark("host")
        drafting = 0.0
        if nodes:
            reading = time.perf_counter()
            self.drafter.catch_up(context)  # a prompt is read once, whatever this step costs
            begun += time.perf_counter() - reading
            tree = self.drafter.propose(context, nodes + 1)
            prices = tree.log_probs[:, 1:].cpu().numpy().astype(np.float64)
            self._times.mark("draft")
            sizes = self._budget.sizes(prices)
            tree = tree.trimmed(1 + torch.from_numpy(sizes))
            self._times.mark("host")
            drafting = time.perf_counter() - begun
            self._admit()  # half of the step is over: who has come since need not wait for the other half
        else:
            tree, sizes = root_only(context.pending), np.zeros(rows, dtype=np.int64)
        begun = time.perf_counter()
        verdict = self.rows.verify(tree, context.longest + tree.size)
        self._times.mark("verify")
        self._conclude(verdict, tree, slice(0, rows))
        if self.base.device.type == "cpu":  # elsewhere the work has only been queued
            self._budget.clock(rows, nodes, sizes, (drafting, time.perf_counter() - begun))

    def _queue(self, rows: int, nodes: int) -> None:
        """Queue a step of `nodes` draft nodes, and look at what came of the one before."""
        context = self._context(rows)
        self._times.mark("host")
        if nodes:
            self.drafter.catch_up(context)
            self._times.mark("draft")
        shape = self.rows.shape(rows, nodes, context.longest)
        step = partial(self.rows.step, shape)
        assert self._graphs is not None
        # How many rows want how many log-probabilities is not part of a shape.
        found = step() if self.rows.logprobs else self._graphs.run(shape, step)
        self._times.mark("verify")
        self._fly(found, slice(0, rows), nodes)
        self._settle(1)

    def _conclude(self, verdict: Verdict, tree: TokenTree, rows: slice) -> None:
        """What follows every forward that makes tokens for `rows`, where the host is there."""
        self.rows.commit(verdict, rows)
        self._times.mark("commit")
        self._fly(report(verdict, tree), rows, tree.size - 1)
        # The step before is still under way on a GPU, and must be while the next one is queued.
        self._settle(0 if self._graphs is None else 2)

    def _fly(self, report: StepReport, rows: slice, nodes: int) -> None:
        """Send the report to the host."""
        slots = self._slots[rows]
        landed = None
        if self.base.device.type == "cuda":
            report = StepReport(
                report.outcome[: len(slots)].to("cpu", non_blocking=True),
                report.prices[: len(slots)].to("cpu", non_blocking=True),
                None if report.logprobs is None else report.logprobs.to_host(),
            )
            landed = torch.cuda.Event(blocking=True)
            landed.record(torch.cuda.current_stream(self.base.device))
        most = min(nodes, self.drafter.depth) + 1
        self._flights.append(Flight(slots, nodes, most, report, self.rows.wanted_logprobs(rows), landed))

    def _settle(self, flying: int) -> None:
        """Look at what came of all steps but the last `flying` ones."""
        while len(self._flights) > flying:
            self._deliver(self._flights.pop(0))

    def _context(self, rows: int, least: float = 0.0) -> DraftContext:
        return self.rows.context([slot.length for slot in self._slots[:rows]], self._ahead, least)

    @property
    def _ahead(self) -> int:
        """Tokens that a row may have more than the host knows of."""
        return sum(flight.most for flight in self._flights)

    @property
    def _cut(self) -> Cut:
        """What can be done with trees before they are verified."""
        return "never" if self._graphs is not None else "each" if self.rows.packs else "alike"

    def _deliver(self, flight: Flight) -> None:
        """Read the outcome, hand out tokens, retire what has ended."""
        if flight.landed is not None:
            flight.landed.synchronize()
        self._times.mark("wait")
        outcome, rows = flight.report.outcome.numpy()[: len(flight.slots)], len(flight.slots)
        # A request may have ended since, and its row have gone on for a step.
        alive = [not slot.handle.future.done() for slot in flight.slots]
        if flight.nodes:
            accepted, real, path, said = np.split(outcome, [1, 2, 2 + (outcome.shape[1] - 2) // 2], axis=1)
            tokens = [row[: count + 1].tolist() for row, count in zip(said, accepted[:, 0], strict=True)]
            nodes = real[:, 0].tolist()
            prices = flight.report.prices.numpy()[:rows].astype(np.float64)
            on_path = np.zeros((rows, flight.nodes + 1), dtype=bool)
            np.put_along_axis(on_path, path, True, axis=1)
            if self._graphs is not None and any(alive):
                self._budget.sizes(prices[alive])  # it learns from what could have been verified, too
            self._budget.observe(prices[alive], on_path[alive, 1:])
        else:
            tokens, nodes = outcome.tolist(), [0] * rows
        logprobs: dict[int, list[TokenLogprob]] = {}
        if flight.report.logprobs is not None:
            wanted = flight.wanted
            read = flight.report.logprobs.read([tokens[row] for row in wanted], list(wanted.values()))
            logprobs = dict(zip(wanted, read, strict=True))
        self._steps += 1
        self._row_steps += sum(alive)
        for row, slot in enumerate(flight.slots):
            if alive[row]:
                self._output_tokens += slot.take(tokens[row], nodes[row], logprobs.get(row))
                self._accepted_tokens += slot.counts.per_step_accepted[-1]
                self._draft_tokens += nodes[row]
        for row in range(rows - 1, -1, -1):
            slot = flight.slots[row]
            if alive[row] and slot.finish_reason is not None:
                generation = slot.generation()
                self._free(self._slots.index(slot)).handle.future.set_result(generation)

    # ---- entering and leaving

    def _refuse_unusable(self, request: Request) -> None:
        ids = request.prompt_ids
        if len(ids) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self.max_length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but prompt and output together may have {self.max_length}: "
                "shorten the prompt or raise max_length"
            )
        if not all(isinstance(one, int) for one in ids):
            raise RequestError("the prompt must be token ids: integers")
        if min(ids) < 0 or max(ids) >= self.base.vocab_size:
            raise RequestError(f"the prompt has token ids outside the vocabulary of {self.base.vocab_size}")
        if (beyond := max(dict(request.sampling.logit_bias), default=0)) >= self.base.vocab_size:
            raise RequestError(f"logit_bias has token {beyond}, outside the vocabulary of {self.base.vocab_size}")

    def _new_slot(self, handle: Handle) -> Slot:
        prompt, sampling = len(handle.request.prompt_ids), handle.request.sampling
        return Slot(
            handle,
            limit=min(sampling.max_new_tokens, self.max_length - prompt),
            length=prompt - 1,
            eos=frozenset() if sampling.ignore_eos else self.base.eos_token_ids,
            tokenizer=self.tokenizer,
        )

    def _in_slots(self) -> list[Slot]:
        return [*self._slots, *self._entering]

    def _admit(self) -> None:
        """Let requests that wait enter free slots.

        All at once if nobody watches, as full batches are fastest. Otherwise a step takes on only so much, so that the
        rows that are watched do not stand still for as long as a long prompt takes.
        """
        while self._may_read() and (self._entering or self._enter()):
            while self._may_join() and self._enter():
                pass
            self._times.mark("host")
            self._prefill()
            self.last_step = time.monotonic()

    def _may_read(self) -> bool:
        """Whether the step may take on more of the prompts that wait."""
        watched = any(slot.handle.streams for slot in self._slots)
        return not watched or self._prefilled_tokens - self._read_before < _PREFILL_CHUNK

    def _may_join(self) -> bool:
        """Whether the next forward has room for another prompt."""
        unread = sum(slot.length - slot.read for slot in self._entering)
        return self.rows.packs_prompts and unread < _PREFILL_CHUNK

    def _enter(self) -> bool:
        """Give the next request the slot behind all others, if there are both, and say whether there were.

        A request that has been in a slot before comes with its output.
        """
        index = len(self._in_slots())
        slot = self._waiting.take() if index < self._most else None
        if slot is None:
            return False
        # It is in its slot before anything can fail, so that `fail` finds it.
        self._entering.append(slot)
        slot.prefilled, slot.read = slot.text, 0
        if slot.entered is None:
            slot.entered = time.monotonic()
        request = slot.handle.request
        self.rows.enter(index, slot.prefilled, request.sampling, len(request.prompt_ids), slot.limit)
        return True

    def _prefill(self) -> None:
        """Run the next tokens of the requests that enter; after all but its last one a request is active.

        That is the first pending token, and the first output token comes from a decode step. Where somebody watches,
        that step is part of the forward over the prompt's end: a plain one, which verifies the pending token alone.
        """
        first, pieces = len(self._slots), self._next_pieces()
        slot, piece, answer = self._entering[0], pieces[0], None
        if slot.handle.streams and slot.first_token is None and piece.start < piece.stop == slot.length:
            answer = self.rows.prefill_last(first, piece)
        else:
            self.rows.prefill(first, pieces)
        self._prefilled_tokens += sum(one.stop - one.start for one in pieces)
        self._times.mark("prefill")
        self._activate(pieces)
        if answer is not None:
            row, tree = slice(first, first + 1), root_only(self.rows.tokens[first, piece.stop : piece.stop + 1])
            verdict = self.rows.judge(tree, tree.ancestors(0), *answer, row)
            self._times.mark("verify")
            self._conclude(verdict, tree, row)

    def _next_pieces(self) -> list[slice]:
        """What the next forward reads of the first requests that enter; an empty piece of one that has been read.

        What another row begins with is copied from there, and a prompt waits for one that has more than half of it.
        What is watched has a forward of its own; see `_prefill`.
        """
        pieces: list[slice] = []
        room = _PREFILL_CHUNK
        for place, slot in enumerate(self._entering):
            donor, shared = (0, 0) if slot.read else self._longest_shared(slot, self._slots)
            start = max(slot.read, shared)
            rest = slot.length - start
            if place:
                coming = self._longest_shared(slot, self._entering[:place])[1]
                watched = slot.handle.streams or self._entering[0].handle.streams
                if watched or not room or not rest or coming - start > rest / 2:
                    break
            if shared:
                self.rows.copy(donor, len(self._slots) + place, shared)
                self._shared_tokens += shared
            pieces.append(slice(start, start + min(room, rest)))
            room -= min(room, rest)
            if not rest:
                break
        return pieces

    def _activate(self, pieces: list[slice]) -> None:
        """`pieces` of the first requests that enter are read."""
        for slot, piece in zip(self._entering[: len(pieces)], pieces, strict=True):
            slot.read = piece.stop
            if slot.read == slot.length:
                self.rows.begin(len(self._slots), slot.length)
                self._slots.append(slot)
                self._entering.remove(slot)
        self._update_mode()

    @staticmethod
    def _longest_shared(slot: Slot, others: Sequence[Slot]) -> tuple[int, int]:
        """Which of `others` begins with most of what `slot` does, and how many tokens that is; 0 if hardly any.

        Keys, values and hidden states of a position follow from the tokens up to it alone, in every kind of attention.
        The last token of either is not counted: as long as it is pending, there is nothing of it to copy.
        """
        lengths = [common_prefix(slot.prefilled[:-1], other.prefilled[:-1]) for other in others]
        shared = max(lengths, default=0)
        return (lengths.index(shared), shared) if shared >= _LEAST_SHARED else (0, 0)

    def _move_up(self, place: int) -> None:
        """The requests that enter, from this one of them on, each take the slot before theirs."""
        for index, slot in enumerate(self._entering[place:], len(self._slots) + place):
            self.rows.move(index, index - 1, self._end_of(slot))

    def _end_of(self, slot: Slot) -> int:
        """No token of it lies behind this place."""
        return slot.length + 1 + self._ahead

    def _free(self, index: int) -> Slot:
        """Take the request at `index` out; the last active row takes its place, and those that enter move up."""
        slot, last = self._slots[index], len(self._slots) - 1
        if index != last:
            self.rows.move(last, index, self._end_of(self._slots[last]))
        self._move_up(0)
        # Last, so that `fail` finds all of them if a move fails.
        self._slots[index] = self._slots[last]
        self._slots.pop()
        self.rows.end(last)
        self._update_mode()
        return slot

    def _drop_unwanted(self) -> None:
        """End the requests that are cancelled or out of time."""
        now = time.monotonic()
        for index in range(len(self._slots) - 1, -1, -1):
            if self._slots[index].handle.unwanted(now):
                self._free(index).drop()
        for place in range(len(self._entering) - 1, -1, -1):
            if (slot := self._entering[place]).handle.unwanted(now):
                self._move_up(place + 1)
                self._entering.remove(slot)
                slot.drop()
        for slot in self._waiting.take_unwanted(now):
            slot.drop()

    def _preempt(self) -> None:
        """Put half of the rows back to wait, and be content with the other half from now on."""
        self._most = (len(self._in_slots()) + 1) // 2
        self._settle(0)
        back = self._in_slots()[min(self._most, len(self._slots)) :]  # who enters is not in its slot as a whole
        self._slots, self._entering = self._slots[: self._most], []
        self._update_mode()
        self.rows.restore([slot.length for slot in self._slots])
        self._waiting.put_back(back)
        self._preemptions += len(back)
        if self.base.device.type == "cuda":
            self._graphs = step_graphs(self.base.device, self.base.devices)  # those of more rows are not needed again
            torch.cuda.empty_cache()  # what is left may be there, but in pieces

    def _update_mode(self) -> None:
        self.rows.expect([slot.handle.request.sampling for slot in self._slots])


def common_prefix(first: Ids, second: Ids) -> int:
    """How many tokens two texts have in common from the start."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size

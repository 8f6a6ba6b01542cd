"""Continuous batching with tree speculative decoding: one loop over slots.

A step reads: admit → draft → slice → verify → walk → commit → retire. Requests enter and leave independently; rows
of different lengths and settings share a batch. Active rows always fill slots `0..B-1`, so that a forward over them
is a view of the buffers. Within a step nothing on the device waits for the host; the host reads the tree's prices
before the verification, to choose its size, and the walk's outcome after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafter.base_model import BaseModel
from drafter.budget import NODE_COUNTS, AdaptiveBudget, Budget, FixedBudget, LatencyTable, batch_sizes
from drafter.drafters.contract import DraftContext, Drafter
from drafter.errors import EngineError, LoadError, RequestError
from drafter.logprobs import PathLogprobs, path_logprobs
from drafter.penalties import History
from drafter.requests import Request, TokenLogprob
from drafter.sampling import SamplingMode, SamplingTable, choose
from drafter.slots import Handle, Ids, Slot
from drafter.stage_times import StageTimes
from drafter.statistics import EngineState
from drafter.token_tree import TokenTree, root_only
from drafter.verification import Walk, walk
from drafter.waiting import WaitingQueue

T = TypeVar("T")

_KV_BUCKET = 64
"""On a GPU, KV lengths are rounded up to this, so that shapes repeat; a CPU would only read more."""
_DEFAULT_MAX_LENGTH = 2048
_PREFILL_CHUNK = 512
"""Prompt tokens of one forward, and about as many a step takes on while somebody watches a row's tokens come."""
_LEAST_SHARED = 8
"""Shorter common beginnings of prompts are computed again: that costs no more than to copy them."""


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine does at once.

    Args:
        slots: Requests decoded together.
        max_length: Prompt and output tokens a slot can hold; None is the base's own limit, at most 2,048.
        max_queue: Requests that may wait for a slot.
        nodes: Draft nodes verified a step; `auto` adapts to what pays on this machine.
        compile: Compile the base's forward with torch.compile: a minute or two at start, less where it was done
            before, for steps with less Python in them.
    """

    slots: int = 16
    max_length: int | None = None
    max_queue: int = 1024
    nodes: int | Literal["auto"] = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("max_queue", self.max_queue), ("max_length", self.max_length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.nodes != "auto" and (isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 0):
            raise ValueError(f"nodes must be 'auto' or an integer of at least 0, not {self.nodes!r}")


@dataclass(frozen=True)
class Verdict:
    """What the base says to a step's trees.

    Args:
        walk: The way down each tree.
        hidden: `[B, N, d]` the nodes' hidden states.
        logprobs: Of the rows that asked for them; None if none did.
    """

    walk: Walk
    hidden: Tensor
    logprobs: PathLogprobs | None


class Engine:
    """The decoding loop. `submit`, `state` and `Handle.cancel` may be called from any thread, `step` from one.

    Args:
        base: The base model.
        drafter: Proposes trees.
        tokenizer: Of the base; decodes texts and stop strings.
        config: Sizes.

    Attributes:
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
        # Draft nodes and the stale ends of a path are written past a row's last token, never read.
        self._capacity = self.max_length + drafter.tree_size + drafter.depth + 1
        device, slots = base.device, config.slots
        self._cache = base.new_cache(slots, self._capacity)
        self._tokens = torch.zeros(slots, self._capacity, dtype=torch.long, device=device)
        self._hidden = (
            torch.zeros(slots, self._capacity, base.hidden_size, dtype=base.dtype, device=device)
            if drafter.reads_hidden
            else None
        )
        self._lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self._offsets = torch.arange(drafter.depth + 1, device=device)
        self._sampling = SamplingTable.empty(slots, self.max_length, device)
        drafter.allocate(slots, self._capacity)
        self._kv_bucket = 1 if device.type == "cpu" else _KV_BUCKET
        self._slots: list[Slot] = []
        # A request that is being prefilled, in the slot behind the active rows, and how many of its tokens are read.
        self._entering: Slot | None = None
        self._read = 0
        self._mode = SamplingMode.of([])
        # Log-probabilities that rows have asked for: row → how many of the most probable tokens.
        self._logprobs: dict[int, int] = {}
        self._waiting = WaitingQueue(config.max_queue)
        self._rows = config.slots  # may be in slots together; fewer after memory ran out
        self._times = StageTimes()
        self._steps = self._row_steps = self._preemptions = 0
        self._output_tokens = self._draft_tokens = self._accepted_tokens = 0
        self._prefilled_tokens = self._shared_tokens = self._read_before = 0
        self.last_step = time.monotonic()
        if config.compile:
            self._compile()
        self._budget: Budget = FixedBudget(0)
        if drafter.tree_size > 1:
            fixed = config.nodes
            self._budget = FixedBudget(fixed) if fixed != "auto" else AdaptiveBudget(self._measure_latency())

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
            active=len(self._slots) + (self._entering is not None),
            waiting=len(self._waiting),
            slots=self._rows,
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
        return not self._slots and self._entering is None and not self._waiting

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
        return self._cache.nbytes

    def fail(self, error: BaseException) -> None:
        """End every request with `error`; later ones are refused."""
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        slots = [*self._in_slots(), *self._waiting.close(failure)]
        self._slots, self._entering = [], None
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
        except torch.OutOfMemoryError:
            if len(self._in_slots()) <= 1:
                raise
            return False  # and only then go on: the error's traceback holds the step's tensors
        return True

    def _decode(self) -> None:
        rows = len(self._slots)
        context = self._context(rows)
        self._times.mark("host")
        begun, drafting = time.perf_counter(), 0.0
        if nodes := min(self._budget.draft(rows), self.drafter.tree_size - 1):
            tree = self.drafter.propose(context, nodes + 1)
            prices = tree.log_prices[:, 1:].cpu().numpy().astype(np.float64)
            self._times.mark("draft")
            drafted = self._budget.nodes(prices)
            tree = tree.leading(drafted + 1)
            self._times.mark("host")
            drafting = time.perf_counter() - begun
            self._admit()  # half of the step is over: who has come since need not wait for the other half
        else:
            tree, prices, drafted = root_only(context.pending), None, 0
        begun = time.perf_counter()
        verdict = self._verify(tree, rows)
        self._times.mark("verify")
        self._conclude(verdict, tree, prices, drafted, slice(0, rows))
        if self.base.device.type == "cpu":  # elsewhere the work has only been queued
            self._budget.clock(rows, nodes, drafted, (drafting, time.perf_counter() - begun))

    def _conclude(
        self, verdict: Verdict, tree: TokenTree, prices: np.ndarray[Any, Any] | None, drafted: int, rows: slice
    ) -> None:
        """What follows every forward that makes tokens for `rows`."""
        self._commit(verdict, rows)
        self._times.mark("commit")
        self._steps += 1
        self._row_steps += rows.stop - rows.start
        self._deliver(verdict, tree, prices, drafted, rows)

    def _context(self, rows: int) -> DraftContext:
        hidden = None if self._hidden is None else self._hidden[:rows]
        return DraftContext(self._tokens[:rows], hidden, self._lengths[:rows], [slot.length for slot in self._slots])

    def _verify(self, tree: TokenTree, rows: int) -> Verdict:
        """Run the base over `tree` `[B, N]` and walk down."""
        lengths = self._lengths[:rows]
        ancestors = tree.ancestors(self._depth(tree))
        longest = max((slot.length for slot in self._slots), default=0) + tree.size
        kv_length = min(-(-longest // self._kv_bucket) * self._kv_bucket, self._capacity)
        logits, hidden = self.base.verify(
            self._cache, tree.tokens.clamp_min(0), lengths, tree.depths, ancestors, kv_length
        )
        return self._judge(tree, ancestors, logits, hidden, slice(0, rows))

    def _depth(self, tree: TokenTree) -> int:
        return min(self.drafter.depth, tree.size - 1)

    def _judge(self, tree: TokenTree, ancestors: Tensor, logits: Tensor, hidden: Tensor, rows: slice) -> Verdict:
        """Walk down the trees of `rows` by the base's choices."""
        lengths, history = self._lengths[rows], None
        if self._mode.penalties:
            history = History(self._tokens[rows], lengths, tree.tokens, tree.depths, ancestors)
        positions = lengths[:, None] + tree.depths + 1 if self._mode.random else None
        choices = choose(logits, self._sampling.rows(rows), self._mode, positions, history)
        step = walk(tree, choices, ancestors, self._depth(tree))
        logprobs = None
        if wanted := self._wanted_logprobs(rows):
            logprobs = path_logprobs(logits, step, [row - rows.start for row in wanted], max(wanted.values()))
        return Verdict(step, hidden, logprobs)

    def _wanted_logprobs(self, rows: slice) -> dict[int, int]:
        return {row: count for row, count in self._logprobs.items() if rows.start <= row < rows.stop}

    def _commit(self, verdict: Verdict, rows: slice) -> None:
        """Move the path's KV, hidden states and tokens to each row's tail; the bonus token becomes pending."""
        step, hidden = verdict.walk, verdict.hidden
        width = step.path.shape[1]
        lengths = self._lengths[rows]
        if width > 1:
            self._cache.commit(lengths, step.path)
        places = lengths[:, None] + self._offsets[:width]
        self._tokens[rows].scatter_(1, places + 1, step.tokens)
        if self._hidden is not None:
            columns = (-1, -1, hidden.shape[-1])
            path_hidden = hidden.gather(1, step.path[:, :, None].expand(columns)) if width > 1 else hidden
            self._hidden[rows].scatter_(1, places[:, :, None].expand(columns), path_hidden.to(self._hidden))
        lengths += step.accepted + 1

    def _deliver(
        self, verdict: Verdict, tree: TokenTree, prices: np.ndarray[Any, Any] | None, drafted: int, rows: slice
    ) -> None:
        """Read the outcome, hand out tokens, retire what has ended."""
        step = verdict.walk
        if drafted:
            real = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
            # One transfer for everything the host wants to know.
            outcome = torch.cat([step.accepted[:, None], real, step.path, step.tokens], dim=1).cpu().numpy()
            self._times.mark("wait")
            path, said = outcome[:, 2 : 2 + step.path.shape[1]], outcome[:, 2 + step.path.shape[1] :]
            tokens = [row[: accepted + 1].tolist() for row, accepted in zip(said, outcome[:, 0], strict=True)]
            nodes = outcome[:, 1].tolist()
            assert prices is not None
            on_path = np.zeros((len(path), drafted + 1), dtype=bool)
            np.put_along_axis(on_path, path, True, axis=1)
            self._budget.observe(prices[:, :drafted], on_path[:, 1:])
        else:
            tokens, nodes = step.tokens.tolist(), [0] * len(step.tokens)
            self._times.mark("wait")
        logprobs: dict[int, list[TokenLogprob]] = {}
        if verdict.logprobs is not None:
            wanted = self._wanted_logprobs(rows)
            read = verdict.logprobs.read([tokens[row - rows.start] for row in wanted], list(wanted.values()))
            logprobs = dict(zip(wanted, read, strict=True))
        for row, new, verified in zip(range(rows.start, rows.stop), tokens, nodes, strict=True):
            slot = self._slots[row]
            self._output_tokens += slot.take(new, verified, logprobs.get(row))
            self._accepted_tokens += slot.counts.per_step_accepted[-1]
        self._draft_tokens += sum(nodes)
        for index in range(rows.stop - 1, rows.start - 1, -1):
            if self._slots[index].finish_reason is not None:
                generation = self._slots[index].generation()
                self._free(index).handle.future.set_result(generation)

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
        return self._slots if self._entering is None else [*self._slots, self._entering]

    def _admit(self) -> None:
        """Let requests that wait enter free slots.

        All at once if nobody watches, as full batches are fastest. Otherwise a step takes on only so much, so that the
        rows that are watched do not stand still for as long as a long prompt takes.
        """
        while self._may_read() and (self._entering is not None or self._enter()):
            self._times.mark("host")
            self._prefill()
            self.last_step = time.monotonic()

    def _may_read(self) -> bool:
        """Whether the step may take on more of the prompts that wait."""
        watched = any(slot.handle.streams for slot in self._slots)
        return not watched or self._prefilled_tokens - self._read_before < _PREFILL_CHUNK

    def _enter(self) -> bool:
        """Give the next request the slot behind the active rows, if there are both, and say whether there were.

        What another row begins with is copied from there. A request that has been in a slot before comes with its
        output.
        """
        slot = self._waiting.take() if len(self._slots) < self._rows else None
        if slot is None:
            return False
        # It is in its slot before anything can fail, so that `fail` finds it.
        self._entering, index = slot, len(self._slots)
        slot.prefilled = slot.text
        if slot.entered is None:
            slot.entered = time.monotonic()
        request = slot.handle.request
        self._tokens[index, : slot.length + 1] = torch.from_numpy(slot.prefilled).to(self.base.device)
        self._sampling.set(index, request.sampling, len(request.prompt_ids), slot.limit)
        self.drafter.admit(index)
        donor, self._read = self._longest_shared(slot.prefilled)
        if self._read:
            self._copy(donor, index, self._read)
        self._shared_tokens += self._read
        return True

    def _prefill(self) -> None:
        """Run the next tokens of the request that enters; after all but the last it is active.

        The last one is the first pending token, and the first output token comes from a decode step. Where somebody
        watches, that step is part of the forward over the prompt's end: a plain one, which verifies the pending token
        alone.
        """
        slot, index, start = self._entering, len(self._slots), self._read
        assert slot is not None
        stop = min(start + _PREFILL_CHUNK, slot.length)
        logits = hidden = None
        if slot.handle.streams and slot.first_token is None and start < stop == slot.length:
            logits, hidden = self.base.prefill_last(self._cache, index, self._tokens[index, start : stop + 1], start)
        elif start < stop:
            hidden = self.base.prefill(self._cache, index, self._tokens[index, start:stop], start)
        if self._hidden is not None and hidden is not None:
            self._hidden[index, start:stop] = hidden[: stop - start]
        self._read = stop
        self._prefilled_tokens += stop - start
        self._times.mark("prefill")
        if stop == slot.length:
            self._lengths[index] = stop
            self._slots.append(slot)
            self._entering = None
            self._update_mode()
        if logits is not None and hidden is not None:
            row, tree = slice(index, index + 1), root_only(self._tokens[index, stop : stop + 1])
            verdict = self._judge(tree, tree.ancestors(0), logits[None], hidden[None, -1:], row)
            self._times.mark("verify")
            self._conclude(verdict, tree, None, 0, row)

    def _longest_shared(self, text: Ids) -> tuple[int, int]:
        """The row that begins with most of `text`, and how many tokens that is; 0 if too few to be worth a copy.

        Keys, values and hidden states of a position follow from the tokens up to it alone, in every kind of attention.
        The last token of either is not counted: as long as it is pending, there is nothing of it to copy.
        """
        lengths = [common_prefix(text[:-1], slot.prefilled[:-1]) for slot in self._slots]
        shared = max(lengths, default=0)
        return (lengths.index(shared), shared) if shared >= _LEAST_SHARED else (0, 0)

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy what the device has of the first `length` positions of slot `source` to slot `target`."""
        self._cache.move(source, target, length)
        self._tokens[target, :length] = self._tokens[source, :length]
        if self._hidden is not None:
            self._hidden[target, :length] = self._hidden[source, :length]

    def _move(self, source: int, target: int, slot: Slot) -> None:
        """`slot`, in slot `source`, goes on in slot `target`."""
        self._copy(source, target, slot.length + 1)
        self._lengths[target] = self._lengths[source]
        self._sampling.move(source, target)
        self.drafter.move(source, target)

    def _free(self, index: int) -> Slot:
        """Take the request at `index` out; the last active row takes its place, and the one that enters that row's."""
        slot, last = self._slots[index], len(self._slots) - 1
        if index != last:
            self._move(last, index, self._slots[last])
        if self._entering is not None:
            self._move(last + 1, last, self._entering)
        # Last, so that `fail` finds all of them if a move fails.
        self._slots[index] = self._slots[last]
        self._slots.pop()
        self._update_mode()
        return slot

    def _drop_unwanted(self) -> None:
        """End the requests that are cancelled or out of time."""
        now = time.monotonic()
        for index in range(len(self._slots) - 1, -1, -1):
            if self._slots[index].handle.unwanted(now):
                self._free(index).drop()
        if self._entering is not None and self._entering.handle.unwanted(now):
            self._entering.drop()
            self._entering = None
        for slot in self._waiting.take_unwanted(now):
            slot.drop()

    def _preempt(self) -> None:
        """Put half of the rows back to wait, and be content with the other half from now on.

        A step writes behind a row's committed tokens and moves its length last. So whatever part of the failed step
        was done, the rows that stay are as they were before it once their lengths are.
        """
        rows = self._in_slots()
        self._rows = (len(rows) + 1) // 2
        self._slots, self._entering = rows[: self._rows], None
        self._update_mode()
        self._lengths[: self._rows] = torch.tensor([slot.length for slot in self._slots], device=self.base.device)
        self._waiting.put_back(rows[self._rows :])
        self._preemptions += len(rows) - self._rows
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()  # what is left may be there, but in pieces

    def _update_mode(self) -> None:
        sampling = [slot.handle.request.sampling for slot in self._slots]
        self._mode = SamplingMode.of(sampling)
        self._logprobs = {row: one.logprobs for row, one in enumerate(sampling) if one.logprobs is not None}

    # ---- before the first step

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the base's forward, and call it once for each of the shapes that compilers tell apart.

        These are one row and several, one node and several. Sizes that happen to be equal would be taken to be so
        always, so none of them are.
        """
        self.base.compile()
        slots, size = self.config.slots, self.drafter.tree_size
        many = max(slots - 1, min(slots, 2))
        several = size + 1 if size == many else size
        try:
            for rows in sorted({1, many}):
                self._slots = [_placeholder(self.max_length // 2)] * rows
                for nodes in (1, several) if size > 1 else (1,):
                    tree = root_only(torch.zeros(rows, dtype=torch.long, device=self.base.device))
                    self._verify(TokenTree(*(part.expand(rows, nodes) for part in vars(tree).values())), rows)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).strip().split("\n")[:2])
            raise LoadError(f"{self.base.name} cannot be compiled here: {reason} (leave compile out)") from error
        self._slots = []

    @torch.inference_mode()
    def _measure_latency(self, rounds: int = 5, seconds: float = 2.0) -> LatencyTable:
        """Time drafting and verification on this machine for the shapes in use.

        Every round takes every shape once, and the least time counts: what else runs on the machine can only add to
        it, and rarely adds to the same shape each time. A round before them warms up.

        Args:
            rounds: At most so many.
            seconds: No further round begins after so long.
        """
        most = self.drafter.tree_size - 1
        counts = tuple(sorted({count for count in NODE_COUNTS if count < most} | {most}))
        batches = batch_sizes(self.config.slots)
        middle = min(256, self.max_length // 2)
        self._lengths.fill_(middle)
        # Drafting is nearly linear in the nodes: a few sizes are measured, those between them follow.
        drafted = (0, *sorted({min(2, most), most // 2, most} - {0}))
        verify = np.full((len(batches), len(counts)), np.inf)
        draft = np.full((len(batches), len(drafted)), np.inf)
        begun = time.monotonic()
        for turn in range(rounds + 1):
            for i, rows in enumerate(batches):
                self._slots = [_placeholder(middle)] * rows
                context = self._context(rows)
                trees = [self._timed(partial(self.drafter.propose, context, count + 1)) for count in drafted[1:]]
                largest = trees[-1][0]
                self._verify(largest.leading(1), rows)  # a plain step comes after another, with what it left in caches
                steps = [self._timed(partial(self._verify, largest.leading(count + 1), rows)) for count in counts]
                if turn:
                    draft[i] = np.minimum(draft[i], [0.0, *(taken for _, taken in trees)])
                    verify[i] = np.minimum(verify[i], [taken for _, taken in steps])
            if turn and time.monotonic() - begun > seconds:
                break
        self._slots = []
        draft = np.array([np.interp(counts, drafted, row) for row in draft])
        return LatencyTable(np.array(batches, dtype=np.float64), counts, verify, draft)

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """What `work` returns, and its seconds on the device."""
        start = time.perf_counter()
        result = work()
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        return result, time.perf_counter() - start


def common_prefix(first: Ids, second: Ids) -> int:
    """How many tokens two texts have in common from the start."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def _placeholder(length: int) -> Slot:
    """A row that stands in for any while latency is measured."""
    return Slot(Handle(Request([0]), stream=False), limit=1, length=length, eos=frozenset(), tokenizer=None)

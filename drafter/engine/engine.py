"""The decoding loop: continuous batching with tree speculative decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from drafter import devices
from drafter.acceptance.contract import ExactVerifier, Verifier, refuse_shallow
from drafter.acceptance.guide import FirstGuides, Guides
from drafter.budget.contract import SHADOW_ROWS, Budget, StepSeconds
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, TextMemory, made_of
from drafter.engine import cuda_graph
from drafter.engine.batch import BatchState
from drafter.engine.config import EngineConfig
from drafter.engine.handle import Handle
from drafter.engine.memory import plan_or_refuse, rows_to_keep
from drafter.engine.queued_step import QueuedStep
from drafter.engine.reading import PromptReader
from drafter.engine.scheduler import Scheduler
from drafter.engine.sequence import Handling, Sequence, refuse_unusable
from drafter.engine.shadows import Shadows
from drafter.engine.step import Clock, DeviceStep, Flights, Outcome, Stages, Step, StepPlan, StepTensors
from drafter.engine.warm_up import compile_base, make_budget, try_dearest_step
from drafter.errors import EngineError, LoadError, RequestError
from drafter.parts.learning import RowTap
from drafter.parts.rooms import rooms
from drafter.parts.steering import masks, steered_drafts
from drafter.requests import Request, sampling_defaults
from drafter.salted import kept_for
from drafter.statistics import EngineState, StageTimes
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree


class Engine:
    """The decoding loop. `submit`, `state` and `Handle.cancel` may be called from any thread, `step` from one.

    Args:
        verifier: By default the exact one.
        budget: By default as `config.num_draft_tokens` says.
        tap: Receives rows that have ended, with the hidden states that the drafter reads.
        drafter_name: Key of step times in the cache folder; None measures them again.
        guides: Make guides for `structured_outputs`. By default those of a method, at the first such request.
        brought: Draft tokens of the largest draft that `Handle.draft` may bring.

    Attributes:
        last_step: When it last made progress, in monotonic seconds: it hangs if it is not idle and this is long ago.

    Raises:
        LoadError: `max_model_len` is more than the model has positions, the model cannot be compiled, drafter and
            verifier do not go together, the verifier is another model's, the model's own sampling settings cannot be
            met, or a GPU has not the memory.
    """

    def __init__(
        self,
        base: BaseModel,
        drafter: Drafter,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        verifier: Verifier | None = None,
        budget: Budget | None = None,
        tap: RowTap | None = None,
        drafter_name: str | None = None,
        guides: Guides | None = None,
        brought: int = 0,
    ) -> None:
        config, verifier = config or EngineConfig(), verifier or ExactVerifier()
        refuse_shallow(verifier, drafter.spec.max_depth)
        verifier.open(base)
        self.base, self.drafter, self.tokenizer = base, drafter, tokenizer
        self.config, self.verifier = config, verifier
        self._defaults = sampling_defaults(base.generation_settings, base.name)
        self.guides = guides or FirstGuides(tokenizer, base.vocab_size, base.eos_token_ids)
        limit = base.max_positions or config.longest  # models with a state alone have no limit
        if config.max_model_len is not None and config.max_model_len > limit:
            raise LoadError(f"max_model_len {config.max_model_len} is more than the {limit} positions of {base.name}")
        self.max_length = min(limit, config.longest)
        self._times = StageTimes()
        counters = ("steps", "row_steps", "output_tokens", "draft_tokens", "accepted_tokens")
        self._counts = Counter(dict.fromkeys((*counters, "prefilled_tokens", "shared_tokens", "preemptions"), 0))
        if config.compile:  # before the packing is settled, which depends on what runs the model
            base.leave_native()
        self._packs = base.allow_packing()
        self._queued, alone = devices.is_asynchronous(base.device), len(base.devices) == 1
        spec = drafter.spec.beside(brought)
        recorded = self._queued and alone and base.ranks == 1 and not (base.caches.trees_wait and spec.max_nodes)
        graphs, plan = cuda_graph.MOST_GRAPHS if recorded else 0, None
        kept = rows_to_keep(base, spec, config, self.max_length, graphs)
        if self._queued and alone:
            plan = plan_or_refuse(base, spec, replace(config, kept_rows=kept), self.max_length, graphs)
        slots, kv_bytes = config.max_num_seqs, config.kv_bytes
        self.batch = BatchState(base, drafter, slots, self.max_length, self._times, kv_bytes, kept, brought)
        # Graphs of a shape always have the same nodes.
        self._device = device = DeviceStep(base, verifier, self.batch, packs=self._packs and not self._queued)
        recorder = cuda_graph.CudaRecorder(base.device) if recorded else None
        self._queue = QueuedStep(device, recorder) if self._queued else None
        self._stages: Stages = self._queue or device
        self.flights = Flights(base.device, lag=int(self._queued))
        self.scheduler = Scheduler(self.batch, self.flights, config.max_queue)
        self._reader = PromptReader(self.scheduler, self.batch, self._counts)
        self._rooms = rooms(tokenizer, self.guides, self.batch, tap, brought)
        self.memories = [one for one in made_of(drafter) if isinstance(one, TextMemory)]
        self._versions = [one.version for one in device.choices]
        self._shadows = Shadows()
        self.wake: Callable[[], object] = lambda: None  # where another thread steps: called when a handle changes
        self.last_step = time.monotonic()
        if config.compile:
            compile_base(device)
        if self._queue and plan is not None:
            try_dearest_step(device, self._queue, plan)
        kept_by = None if config.compile else drafter_name
        self.budget = budget or make_budget(device, self._queue, config.num_draft_tokens, kept_by)

    # ---- from any thread

    def submit(self, request: Request, *, stream: bool = False) -> Handle:
        """Queue a request.

        Raises:
            RequestError: The prompt is empty, too long, or not of token ids in the vocabulary, or there is no guide for
                its `structured_outputs`, of which the first one takes a second.
            QueueFullError: `max_queue` requests are waiting.
            EngineError: The engine has failed before.
        """
        request = replace(request, sampling=request.sampling.over(self._defaults))
        refuse_unusable(request, self.base, self.verifier, self.max_length)
        handle = Handle(request, stream=stream, on_change=self._look_again)
        with kept_for(request.salt):
            parts = [part for room in self._rooms if (part := room(handle)) is not None]
            sequence = Sequence(handle, self.base.eos_token_ids, self.tokenizer, self.max_length, parts)
        if self.idle:
            self.last_step = time.monotonic()
        self.scheduler.queue(background=request.background).put(sequence)
        return handle

    def state(self) -> EngineState:
        """Return the engine's counters. They may be a step apart."""
        return EngineState(
            active=len(self.scheduler.in_slots),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.background),
            slots=self.scheduler.limit.most,
            stage_seconds=dict(self._times.seconds),
            memory_tokens=sum(one.memory.tokens for one in self.memories),
            memory_bytes=sum(one.memory.nbytes for one in self.memories),
            choices=self.budget.choices(),
            drafter_version=next((version for version in self._versions if version is not None), None),
            **self._counts,
        )

    def _look_again(self) -> None:
        self.scheduler.look_again()
        self.wake()

    @property
    def idle(self) -> bool:
        """True if a step has nothing to do. Requests may be parked."""
        scheduler = self.scheduler
        waiting = scheduler.waiting or scheduler.background
        return not (scheduler.in_slots or self.flights or waiting or scheduler.parked_to_look_at)

    @property
    def failure(self) -> EngineError | None:
        """The error that stopped decoding; None while the engine works."""
        return self.scheduler.waiting.closed

    def fail(self, error: BaseException) -> None:
        """End every request with `error`; later ones are refused."""
        failure = error
        if not isinstance(failure, EngineError):
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self.flights.clear()
        for sequence in self.scheduler.close(failure):
            if not sequence.ended:
                sequence.handle.future.set_exception(failure)

    # ---- the loop

    @torch.inference_mode()
    def step(self) -> None:
        """Admit sequences that wait, and decode one step of every active one.

        If the device's memory runs out, half of the sequences are preempted, and admitted again step by step. If it
        does not hold even one sequence, that is an error like any other.
        """
        self._begin_step()
        exhausted = False
        try:
            for sequence in self.scheduler.take_unwanted(time.monotonic()):
                sequence.fail_unwanted(self.verifier)
            self._park()
            self._share_slots()
            self._admit()
            self._park()  # the first token of a prompt may be all that is wanted for now
            if (plan := self._planned()) is not None:
                self.flights.add(*self._run(plan))
            lands = plan is None or plan.follows or not self.scheduler.active
            self._deliver(0 if lands else self.flights.lag)
            if plan is not None:
                self.scheduler.limit.reached()
        except torch.OutOfMemoryError:
            if len(self.scheduler.in_slots) <= 1:
                raise
            exhausted = True
        if exhausted:  # not in the handler: there the error's traceback still holds the step's tensors
            self._preempt()
        self._times.mark("host")
        self.last_step = time.monotonic()

    def _planned(self) -> StepPlan | None:
        """Decide about the next step, which there is memory for; None if no sequence is active."""
        while True:
            self._make_room()
            if not (sequences := list(self.scheduler.active)):
                return None
            plan = self._plan(sequences)
            if not (plan.follows and self.flights):
                return plan
            self._deliver(0)  # of what the host knows then the plan may be another one

    def _plan(self, sequences: list[Sequence]) -> StepPlan:
        context = self.batch.context([sequence.length for sequence in sequences], self.flights.ahead)
        ask, useful = Ask(0), self._useful(sequences)
        waits, brought = any(sequence.waits for sequence in sequences), None
        follows = waits or not self._queued
        if max(useful):
            ask = self.budget.plan(len(sequences))
            if waits and not self.flights:
                brought = [sequence.brought() for sequence in sequences]
                ask = replace(ask, nodes=0) if all(brought) else ask
            if ask.nodes and not self._device.choices[ask.member].spec.graph_safe:
                follows = True
        # Other numbers of draft tokens than a budget has learnt of would cost it more than they save, and a graph has
        # always the same.
        limits = useful if ask.fixed and follows else None
        return StepPlan.of(sequences, 0, self.batch, ask, context, limits, follows=follows, brought=brought)

    def _useful(self, sequences: list[Sequence]) -> list[int]:
        """Return for each sequence how many accepted draft tokens it could still take."""
        if not self.verifier.lossless:  # it may look at draft tokens that do not become output
            return [self.drafter.spec.max_nodes] * len(sequences)
        return [one.limit - len(one.output) - 1 for one in sequences]

    def _run(self, plan: StepPlan) -> tuple[Step, StepTensors]:
        """Do a planned step stage by stage; on a GPU that is queued, and under way when this returns."""
        assert plan.context is not None
        clock = Clock(device=None if plan.follows else devices.device_timer(self.base.device))
        slow = self._queue.graphs.slow if self._queue else 0
        self._prepare(plan, plan.context, clock)
        tree, on_host, forced = self._draft(plan, plan.context, clock)
        if plan.ask.nodes and plan.follows:
            self._times.mark("host")
            clock.drafting += clock.lap()
            self._admit()  # between drafting and verification, which halves the wait of sequences that enter
            # The tree's rows are the first slots. A new sequence takes a slot behind them, and what ends now is new.
            assert self.scheduler.active[: len(plan.sequences)] == plan.sequences
        clock.lap()
        with clock.on_device("verifying"):
            verified = self._stages.verify(tree, plan.context.longest + tree.size)
        allowed = masks(on_host, plan.steering, self.base.vocab_size)  # while a GPU does it
        self._times.mark("verify")
        with clock.on_device("committing"):
            tensors = self._stages.finish(verified, plan.rows, plan.wanted, allowed)
        clock.usual = not self._queue or self._queue.graphs.slow == slow
        if not self._queue:
            clock.rest = clock.lap()
        self._times.mark("commit")
        return Step(plan, clock, self._device.choices[plan.ask.member].version, forced), tensors

    def _prepare(self, plan: StepPlan, context: DraftContext, clock: Clock) -> None:
        """Let the drafter do what is no part of a graph, and draft a shadow if the plan has one."""
        self._times.mark("host")
        planning = clock.lap()
        if plan.ask.shadow is not None:
            self._draft_shadow(plan.sequences[:SHADOW_ROWS], plan.ask.shadow, clock)
        if plan.ask.nodes:
            clock.drafting = planning + clock.lap()
            self._device.choices[plan.ask.member].prepare(context)
            clock.reading = clock.lap()
            self._times.mark("draft")

    def _draft_shadow(self, sequences: list[Sequence], ask: Ask, clock: Clock) -> None:
        """Draft trees of a few rows, which the text that follows will be compared with."""
        plan = StepPlan.of(sequences, 0, self.batch, ask)
        context = self.batch.context([sequence.length for sequence in sequences])
        self._device.choices[ask.member].prepare(context)
        reading = clock.lap()
        tree = self._device.draft(context, ask)
        found = steered_drafts(tree, plan.brought, plan.drafted_steering, ask, self.batch.spec)
        self._shadows.add(sequences, ask, *(found or (tree, [0] * len(sequences))))
        clock.shadow = StepSeconds(reading, clock.lap(), 0.0)
        self._times.mark("draft")

    def _draft(
        self, plan: StepPlan, context: DraftContext, clock: Clock
    ) -> tuple[TokenTree, TokenTree | None, list[int]]:
        """Draft trees within the plan's limits, and what must come.

        Returns:
            The trees; the same on the host if a row is steered; and how many tokens at each one's start must come.
        """
        with clock.on_device("drafting"):
            tree = self._stages.draft(context, plan.ask)
        if plan.ask.nodes:
            if min(plan.deepest) < plan.depth:
                deepest = plan.deepest + [0] * (len(tree.tokens) - len(plan.deepest))  # rows of padding
                tree = tree.no_deeper(devices.send(torch.tensor(deepest), tree.depths.device))
            self._times.mark("tree")
            if not self._queued:
                tree = tree.trimmed((tree.tokens >= 0).sum(1))  # without padding
        found = steered_drafts(tree, plan.brought, plan.drafted_steering, plan.ask, self.batch.spec)
        if found is None:
            return tree, None, [0] * len(plan.sequences)
        on_host, forced = found
        sent = TokenTree(*(devices.send(part, self.base.device) for part in vars(on_host).values()))
        return sent, on_host, forced

    def _deliver(self, keep: int) -> None:
        """Read all steps but the last `keep` ones: hand out tokens, let budget and drafter learn, retire."""
        for step, tensors in self.flights.land(keep):
            self._times.mark("wait")
            outcome, alive, sequences = Outcome.read(step, tensors), step.alive, step.plan.sequences
            emitted = {row: outcome.hand_out(row) for row in alive}
            if step.plan.follows:
                step.clock.landed()  # the device has waited for the host until here
            self._counts.update(
                steps=1,
                row_steps=len(alive),
                output_tokens=sum(emitted.values()),
                draft_tokens=sum(outcome.drafted[row] for row in alive),
                accepted_tokens=sum(sequences[row].counts.per_step_accepted[-1] for row in alive),
            )
            if (observation := outcome.observation(emitted, self._shadows)) is not None:
                self.budget.observe(observation)
            slots = self.scheduler.slots_of([sequences[row] for row in alive])
            self.drafter.observe(Committed(slots, [outcome.tokens[row][: emitted[row]] for row in alive]))
            for row in reversed(alive):
                self._end_if_over(sequences[row], sound=outcome.sound[row])

    # ---- the rest of a step

    def _begin_step(self) -> None:
        self.last_step = time.monotonic()
        self._times.start()
        self.scheduler.begin_step()
        for member, drafter in enumerate(self._device.choices):
            if drafter.version != self._versions[member]:
                self._versions[member] = drafter.version
                self.budget.renewed(member)
        self._read_before = self._counts["prefilled_tokens"]

    def _admit(self) -> None:
        """Let sequences enter, and read their prompts.

        They enter all at once if no active one is streamed and all have one salt, as full batches are fastest.
        Otherwise a step reads only so many tokens, so that others do not stand still for as long as long prompts take.
        """
        while self._may_read() and self.scheduler.admit(packs=self._packs):
            self._times.mark("host")
            self._prefill()
            self.last_step = time.monotonic()

    def _may_read(self) -> bool:
        read = self._counts["prefilled_tokens"] - self._read_before
        return read < self.scheduler.chunk or not self.scheduler.has_company

    def _prefill(self) -> None:
        """Read the next tokens of the sequences that enter; after all but its last one a sequence is active."""
        slot, clock, sequence = len(self.scheduler.active), Clock(), self.scheduler.entering[0]
        try:
            if not sequence.prepare(slot, self.scheduler.chunk):
                self._read_before -= self.scheduler.chunk  # it took as long
                return
        except RequestError as error:
            self.scheduler.take_out(sequence)
            sequence.handle.future.set_exception(error)
            return
        spans, verified = self._reader.read()
        self._times.mark("prefill")
        self.scheduler.activate(spans)
        if verified is None:
            return
        plan = StepPlan.of([sequence], slot, self.batch, Ask(0))
        allowed = masks(None, plan.steering, self.base.vocab_size)
        tensors = self._device.finish(verified, plan.rows, plan.wanted, allowed)
        self._times.mark("verify")
        self.flights.add(Step(plan, clock, None, [0]), tensors)
        # The step before is still under way on a GPU, and must be while the next one is queued.
        self._deliver(2 * self.flights.lag)

    def _make_room(self) -> None:
        """Reserve memory for the next step; if there is too little, the youngest sequences give theirs up."""
        while not self.scheduler.grow():
            self._put_back(self.scheduler.youngest())

    def _share_slots(self) -> None:
        """Preempt sequences of salts that have more slots than others of which some wait."""
        while (sequence := self.scheduler.over_share()) is not None:
            self._put_back(sequence)

    def _park(self) -> None:
        """Take sequences out of the steps, and back, as their handles say, and background ones for others."""
        self.scheduler.give_way()
        if self.scheduler.to_park:
            self._deliver(0)  # it may end a sequence
        for sequence in self.scheduler.to_park:
            self.scheduler.park(sequence)
        while (parked := self.scheduler.next_to_unpark()) is not None:
            self.scheduler.unpark(parked)

    def _put_back(self, sequence: Sequence) -> None:
        if self.flights:
            self._deliver(0)  # it may end a sequence, and must not come for one that waits
        else:
            self.scheduler.put_back(sequence)
            self._counts["preemptions"] += 1

    def _preempt(self) -> None:
        self._deliver(0)
        self._counts["preemptions"] += self.scheduler.preempt()
        if self._queue:
            self._queue.graphs.forget()  # they hold memory, and those of more rows are not needed for now
        if self.base.sight is not None:
            self.base.sight.forget()
        devices.release_unused(self.base.device)

    def _end_if_over(self, sequence: Sequence, *, sound: bool) -> None:
        """Retire a sequence that has come to its end, or must be read again; see `Handling`."""
        if sequence.finish_reason is not None:
            generation = sequence.generation(self.verifier)
            self.scheduler.end(sequence)
            sequence.handle.future.set_result(generation)
        elif sequence.handling in (Handling.STUCK, Handling.NOT_FINITE):
            self.scheduler.take_out(sequence, poisoned=not sound)
            sequence.fail()
        elif not sound and sequence.handling is Handling.ALONE:  # until this step it was `COPIED`
            self.scheduler.read_again(sequence)

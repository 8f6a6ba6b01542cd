"""The decoding loop: continuous batching with tree speculative decoding.

A step admits sequences, plans, drafts, verifies, accepts, commits and delivers. Sequences enter and leave
independently; those of different lengths and settings share a batch.

On a CPU the host follows a step's stages (`EagerStep`). On a GPU a step is queued as a whole, and its outcome is read
while the next one runs (`GraphStep`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from drafter import devices
from drafter.acceptance.contract import ExactVerifier, Verifier
from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.choosing_budget import ChoosingBudget
from drafter.budget.contract import Budget, FixedBudget, StepLoad, StepObservation
from drafter.drafters.contract import Ask, Committed, Drafter
from drafter.engine.admission import Admission
from drafter.engine.batch import BatchState
from drafter.engine.config import DEFAULT_MAX_LENGTH, EngineConfig
from drafter.engine.cuda_graph import step_graphs
from drafter.engine.runners import EagerStep, GraphStep
from drafter.engine.scheduler import Scheduler
from drafter.engine.sequence import Handle, Sequence, new_sequence, refuse_unusable
from drafter.engine.step import DeviceStep, Flights, RowOutcomes, Step, StepOutcome
from drafter.engine.tap import EndedRow, RowTap
from drafter.engine.warm_up import compile_base, engine_sizes, plan_or_refuse, step_costs, try_dearest_step
from drafter.errors import EngineError, LoadError
from drafter.requests import Request, sampling_defaults
from drafter.statistics import EngineState, StageTimes
from drafter.target.model import BaseModel


class Engine:
    """The decoding loop. `submit`, `state` and `Handle.cancel` may be called from any thread, `step` from one.

    Args:
        base: The base model.
        drafter: Proposes trees.
        tokenizer: Of the base; decodes texts and stop strings.
        config: Sizes.
        verifier: Decides what is accepted; by default the exact one.
        budget: Decides how much is drafted and verified; by default as `config.num_draft_tokens` says.
        tap: Is given rows that have ended, with the hidden states that the drafter reads; by default nobody is.
        drafter_name: What step times are kept by in the cache folder; None measures them anew.

    Attributes:
        batch: What the device holds.
        scheduler: Who waits, and who is in which slot.
        flights: Steps whose outcome the host has not read.
        budget: Decides how much is drafted and verified.
        last_step: When it last gave a sign of life, in monotonic seconds: if it is not idle and this is long ago, it
            hangs.

    Raises:
        LoadError: `max_model_len` is more than the base has positions, the base cannot be compiled, drafter and
            verifier do not go together, the verifier is another base's, the base's own sampling settings cannot be met,
            or a GPU has not the memory.
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
    ) -> None:
        config, verifier = config or EngineConfig(), verifier or ExactVerifier()
        _refuse_mismatch(drafter, verifier)
        verifier.open(base)
        self.base, self.drafter, self.tokenizer = base, drafter, tokenizer
        self.config, self.verifier, self._tap = config, verifier, tap
        self._defaults = sampling_defaults(base.generation_settings, base.name)
        self._version = drafter.version
        limit = base.max_positions or DEFAULT_MAX_LENGTH
        if config.max_model_len is not None and config.max_model_len > limit:
            raise LoadError(f"max_model_len {config.max_model_len} is more than the {limit} positions of {base.name}")
        self.max_length = min(limit, config.longest)
        self._times = StageTimes()
        self._graphs = step_graphs(base.device, base.devices, graph_safe=drafter.spec.graph_safe)
        if config.compile:  # before the packing is settled, which depends on what runs the model
            base.leave_native()
        self._packs = base.allow_packing()
        plan = None
        if self._graphs is not None and len(base.devices) == 1:
            sizes = engine_sizes(base, drafter.spec, config, self.max_length, self._graphs.most)
            plan = plan_or_refuse(base.device, sizes)
        self.batch = BatchState(base, drafter, config.max_num_seqs, self.max_length, self._times, config.kv_bytes)
        # A step that is repeated as a whole always has the same nodes.
        self._device_step = DeviceStep(base, verifier, self.batch, packs=self._graphs is None and self._packs)
        # A drafter whose work is no part of a graph looks at what the host knows, which must not be a step behind.
        behind = self._graphs is not None and drafter.spec.graph_safe
        self.flights = Flights(base.device, GraphStep.lag if behind else EagerStep.lag)
        self.scheduler = Scheduler(self.batch, self.flights, config.max_queue)
        self._admission = Admission(
            self.scheduler,
            self._device_step,
            self._times,
            packs=self._packs,
            on_outcome=self._take_first_token,
            on_progress=self._live,
        )
        self._steps = self._row_steps = self._preemptions = 0
        self._output_tokens = self._draft_tokens = self._accepted_tokens = 0
        self.last_step = time.monotonic()
        if config.compile:
            compile_base(self._device_step)
        if plan is not None:
            try_dearest_step(self._device_step, plan)
        self.budget = budget or self._make_budget(None if config.compile else drafter_name)
        self._runner: EagerStep | GraphStep
        if self._graphs is None:
            self._runner = EagerStep(self._device_step, self.budget, self._times, self._admission.admit)
        else:
            self._runner = GraphStep(self._device_step, self._graphs, self.budget, self._times)

    # ---- from any thread

    def submit(self, request: Request, *, stream: bool = False) -> Handle:
        """Queue a request.

        Raises:
            RequestError: The prompt is empty, too long, or not of token ids in the vocabulary.
            QueueFullError: `max_queue` requests are waiting.
            EngineError: The engine has failed before.
        """
        request = replace(request, sampling=request.sampling.over(self._defaults))
        refuse_unusable(request, self.base, self.verifier, self.max_length)
        handle = Handle(request, stream=stream, on_cancel=self.scheduler.waiting.look_again)
        if self.idle:
            self.last_step = time.monotonic()
        sequence = new_sequence(handle, self.base, self.tokenizer, self.verifier, self.max_length)
        self.scheduler.waiting.put(sequence)
        return handle

    def state(self) -> EngineState:
        """Return the engine's counters. They may be a step apart."""
        memory = self.drafter.memory
        return EngineState(
            active=len(self.scheduler.in_slots),
            waiting=len(self.scheduler.waiting),
            slots=self.scheduler.limit.most,
            steps=self._steps,
            row_steps=self._row_steps,
            output_tokens=self._output_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            prefilled_tokens=self._admission.prefilled_tokens,
            shared_tokens=self._admission.shared_tokens,
            preemptions=self._preemptions,
            stage_seconds=dict(self._times.seconds),
            memory_tokens=memory.tokens,
            memory_bytes=memory.nbytes,
            choices=self.budget.choices(),
            drafter_version=self._version,
        )

    @property
    def idle(self) -> bool:
        """True if no sequence is active or waiting."""
        return not self.scheduler.in_slots and not self.flights and not self.scheduler.waiting

    @property
    def failure(self) -> EngineError | None:
        """The error that stopped decoding; None while the engine works."""
        return self.scheduler.waiting.closed

    @property
    def active(self) -> int:
        """Requests being decoded."""
        return len(self.scheduler.active)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache."""
        return self.batch.cache.nbytes

    def fail(self, error: BaseException) -> None:
        """End every request with `error`; later ones are refused."""
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self.flights.clear()
        for sequence in [*self.scheduler.clear(), *self.scheduler.waiting.close(failure)]:
            if not sequence.ended:
                sequence.handle.future.set_exception(failure)

    # ---- the loop

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one step of every active sequence; sequences that wait enter free slots.

        When the device's memory runs out, half of the sequences are taken out and decoded later; more are let in again
        step by step. A sequence whose memory is not enough even when it is alone is an error like any other.
        """
        self._live()
        self._times.start()
        self._renew()
        self._admission.begin_step()
        exhausted = False
        try:
            self._drop_unwanted()
            self._admission.admit()
            self._make_room()
            if decodes := bool(self.scheduler.active):
                self._decode()
            self._deliver(self.flights.lag if self.scheduler.active else 0)
            if decodes:
                self.scheduler.limit.reached()
        except torch.OutOfMemoryError:
            if len(self.scheduler.in_slots) <= 1:
                raise
            exhausted = True
        if exhausted:  # not in the handler: there the error's traceback still holds the step's tensors
            self._preempt()
        self._times.mark("host")
        self._live()

    def _renew(self) -> None:
        """Let the drafter take other weights, if some were offered."""
        if (renewal := self.drafter.renew()) is not None:
            self._version = renewal.version
            for member in renewal.members:
                self.budget.renewed(member)

    def _decode(self) -> None:
        """Plan, draft, verify, accept and commit, for all active sequences."""
        sequences = list(self.scheduler.active)
        context = self.batch.context([sequence.length for sequence in sequences], self.flights.ahead)
        step = self._runner.run(context, [sequence.plain for sequence in sequences])
        self._launch(step, sequences, slice(0, len(sequences)))

    def _launch(self, step: Step, sequences: list[Sequence], rows: slice) -> None:
        """Send a step's outcome to the host, which reads it in `_deliver`."""
        step.sequences, step.stays = sequences, [one.stay for one in sequences]
        step.wanted, step.version = self._device_step.wanted_logprobs(rows), self.drafter.version
        self.flights.add(step)

    def _deliver(self, keep: int) -> None:
        """Read the outcomes of all steps but the last `keep` ones: hand out tokens, let others learn, retire."""
        for step in self.flights.land(keep):
            self._times.mark("wait")
            outcome, alive = step.outcome.unpack(), step.alive
            logprobs = step.outcome.read_logprobs(step.wanted, outcome.tokens)
            self._steps += 1
            self._row_steps += len(alive)
            given = []
            for row in alive:
                sequence, drafted = step.sequences[row], outcome.drafted[row]
                emitted = sequence.take(
                    outcome.tokens[row], outcome.accepted[row], drafted, logprobs.get(row), outcome.lenient[row]
                )
                sequence.proven |= outcome.sound[row]
                if drafted and step.version is not None:
                    sequence.note_version(step.version)
                given.append(outcome.tokens[row][:emitted])
                self._output_tokens += emitted
                self._accepted_tokens += sequence.counts.per_step_accepted[-1]
                self._draft_tokens += drafted
            self._teach_budget(step, outcome, {row: len(tokens) for row, tokens in zip(alive, given, strict=True)})
            slots = self.scheduler.slots_of([step.sequences[row] for row in alive])
            self.drafter.observe(Committed(slots, given))
            for row in reversed(alive):
                self._end_if_over(step.sequences[row], sound=outcome.sound[row], drafted=outcome.drafted[row] > 0)

    def _end_if_over(self, sequence: Sequence, *, sound: bool, drafted: bool) -> None:
        """Retire a sequence that has come to its end, or whose numbers are not finite.

        They may have been a draft token's alone. The step has then left the sequence as it was; it goes on plainly.
        """
        if sequence.finish_reason is not None:
            if self._tap is not None:
                self._hand_out(sequence, self._tap)
            generation = sequence.generation()
            self.scheduler.retire(sequence)
            sequence.handle.future.set_result(generation)
        elif not sound and drafted:
            sequence.plain = True
        elif not sound and sequence.borrowed:
            self.scheduler.read_again(sequence)
        elif not sound:
            self.scheduler.retire(sequence, poisoned=True)
            sequence.fail_not_finite()
        elif not drafted and self._graphs is not None:
            sequence.plain = False  # the others would have no drafts, either, for as long as it lasts

    def _hand_out(self, sequence: Sequence, tap: RowTap) -> None:
        """Give a row that has ended to who learns from it, where it may be, and its text is the base's own."""
        request = sequence.handle.request
        if not request.may_teach:
            return
        row = EndedRow(request.request_id, request.prompt_ids, sequence.output, sequence.counts.num_decode_steps)
        if not sequence.lenient and tap.wants(row, row.length * self.batch.hidden_bytes):
            slot = self.scheduler.active.index(sequence)
            tap.put(row, *self.batch.fetch_hidden(slot, row.length))

    def _teach_budget(self, step: Step, outcome: RowOutcomes, emitted: dict[int, int]) -> None:
        """Let the budget learn from a step; `emitted` are the new tokens by row."""
        alive = [row for row in emitted if outcome.sound[row]]
        if not step.planned or not alive:
            return
        log_probs = outcome.log_probs[alive]
        self.budget.observe(
            StepObservation(
                replace(step.load, rows=len(alive)),
                step.ask.nodes,
                log_probs if step.promised is None else step.promised[alive],
                log_probs,
                outcome.on_path[alive],
                step.seconds,
                step.ask.member,
                sum(emitted[row] for row in alive),
            )
        )

    # ---- entering and leaving

    def _live(self) -> None:
        """Give a sign of life."""
        self.last_step = time.monotonic()

    def _take_first_token(self, outcome: StepOutcome, slot: int) -> None:
        """Deliver the plain step that came with a prompt's forward."""
        sequence = self.scheduler.active[slot]
        step = Step(StepLoad(1, sequence.length), Ask(0), outcome, depth=0, planned=False)
        self._launch(step, [sequence], slice(slot, slot + 1))
        # The step before is still under way on a GPU, and must be while the next one is queued.
        self._deliver(2 * self.flights.lag)

    def _drop_unwanted(self) -> None:
        """End the sequences that are cancelled or out of time."""
        for sequence in self.scheduler.take_unwanted(time.monotonic()):
            sequence.fail_unwanted()

    def _make_room(self) -> None:
        """Have memory for the next step; the sequences that have come last give theirs up if there is too little."""
        while not self.scheduler.grow():
            if self.flights:
                self._deliver(0)  # it may end a sequence, and must not come for one that waits
            else:
                self.scheduler.put_youngest_back()
                self._preemptions += 1

    def _preempt(self) -> None:
        """Put half of the sequences back to wait, and be content with the other half for now; see `RowLimit`."""
        self._deliver(0)
        self._preemptions += self.scheduler.preempt()
        if self._graphs is not None:
            self._graphs.forget()  # they hold memory, and those of more rows are not needed for now
        devices.release_unused(self.base.device)

    def _make_budget(self, drafter_name: str | None) -> Budget:
        nodes = self.config.num_draft_tokens
        if not self.drafter.spec.max_nodes:
            return FixedBudget(0)
        if nodes != "auto":
            return FixedBudget(min(nodes, self.drafter.spec.max_nodes))
        budgets = [AdaptiveBudget(table) for table in step_costs(self._device_step, self._graphs, drafter_name)]
        return budgets[0] if len(budgets) == 1 else ChoosingBudget(self.drafter.members, budgets, self.drafter.withheld)


def _refuse_mismatch(drafter: Drafter, verifier: Verifier) -> None:
    """Raise `LoadError` for a drafter and a verifier that do not go together."""
    if drafter.spec.lossless_only and not verifier.lossless:
        raise LoadError(f"this drafter needs a lossless verifier, and {verifier.name} is not: use exact")
    if verifier.lookahead > drafter.spec.max_depth:
        raise LoadError(
            f"verifier {verifier.name} looks {verifier.lookahead} draft tokens ahead, and this drafter drafts only "
            f"{drafter.spec.max_depth}: use a deeper drafter"
        )

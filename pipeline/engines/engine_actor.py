"""An engine in a process of its own: parts of requests in, committed parts of generated rows out.

The feeder keeps slightly more rows in the engine than there are slots, starts long rows first, and runs rows that may
have killed an engine alone. One thread submits rows after the ledger has recorded them, so the ledger's rows inside an
engine are those that it is working on, or about to.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data

from drafter.errors import LoadError, NotFiniteError, RequestError, RequestTimeoutError, one_line, without_secrets
from drafter.requests import Generation, Request, SamplingParams
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.ledger import ALONE_FROM, RemoteLedger, RowKey, RowOutcome
from pipeline.engines.models import EngineSpec, capacity
from pipeline.engines.shared_texts import MemoryFeed, OtherTexts
from pipeline.errors import InputError, JobError, ProblemType, RowError
from pipeline.generate.rollout import ProgramAnswer, ProgramRow, Rollout, UnderWay, Work, program_rows, program_values
from pipeline.io.parts import unpack, with_problems
from pipeline.io.prompts import PROMPT_COLUMNS, read_prompts
from pipeline.learning.job_learner import find_learner
from pipeline.output.columns import RunTraits, column_values, columns_type, wanted_columns
from pipeline.progress.board import BEAT_SECONDS, EngineFacts, EngineReport, Kind, PartReport
from pipeline.progress.prometheus import EngineMetrics, RowMetrics
from pipeline.progress.watch import Pulse
from pipeline.settings import LimitsConfig

if TYPE_CHECKING:  # a driver imports this module, too, without the code of models
    from drafter.llm import SpeculativeLM

_PULSE_SECONDS = 1.0
"""Longest wait of the feeder while the engine has rows to go on with, so that one ledger call covers many rows."""
_LOOKS = 10  # of the watchdog per time limit
_LOAD_AGAIN_SECONDS = 5.0
_LAST_WORD_SECONDS = 5

Report = Callable[[Mapping[str, RowOutcome]], None]


class EngineProcess:
    """An engine that is fed through the ledger. Its failure ends the process, so that Ray starts another."""

    def __init__(self, spec: EngineSpec, limits: LimitsConfig, ledger: Any) -> None:
        self._ledger = RemoteLedger(ledger)
        self._lm: SpeculativeLM
        # An error here would make Ray retry what cannot succeed, so the first call raises it.
        self.failure: Exception | None = None
        if not self._ledger.arrive():
            self.failure = JobError("an engine's process ended again and again without finishing a row")
            return
        self.failure = self._load(spec)
        if self.failure is not None:
            self._tell("failure", one_line(self.failure))
            return
        slots = spec.config.max_num_seqs
        self._row_seconds = limits.row_seconds
        self._feeder = Feeder(self._submit, self._finished, self._ledger, slots)
        stuck = RuntimeError(f"a step took longer than limits.step_seconds, {limits.step_seconds:g}")
        watch(self._lm.engine, limits.step_seconds, partial(self._end, stuck))

    def _load(self, spec: EngineSpec) -> LoadError | None:
        """Load the models; return the error, or end the process if another engine could load them on its machine."""
        try:
            self._lm = spec.load(partial(self._tell, "stage"))
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, LoadError):
                failure = error
            else:  # such as too little memory
                failure = LoadError(f"the models cannot be loaded: {type(error).__name__}: {error}")
            if self._ledger.has_loaded():
                time.sleep(_LOAD_AGAIN_SECONDS)
                self._end(failure)
            return failure
        here = self._lm.base.fingerprint
        first = self._ledger.loaded(here)
        if here != first:
            return LoadError(f"the model's weights ({here}) are not those of the output's other rows ({first})")
        return None

    def _submit(self, work: Work) -> UnderWay:
        assert isinstance(work, Request)
        return self._lm.submit(work)

    def _outcomes(self, part: str, requests: Mapping[str, Work], report: Report) -> dict[str, RowOutcome]:
        try:
            return self._feeder.generate(part, requests, report)
        except JobError:  # another process would be given the same parts
            raise
        except Exception as error:
            traceback.print_exc()
            self._end(error)
            raise

    def _finished(self, result: Any, work: Any) -> dict[str, Any]:
        """Return the output columns of a request or a program that has ended with this result."""
        raise NotImplementedError

    def _tell(self, kind: Kind, report: Any, sender: str | None = None) -> None:
        """Report to the job."""

    def _end(self, why: Exception) -> None:
        said = f"{type(why).__name__}: {one_line(why)}"
        print(said, file=sys.stderr, flush=True)
        self._tell("crash", said)
        _die()


class EngineActor(EngineProcess):
    """Generates and commits parts of requests.

    Args:
        commit: Writes a part's rows for good. The engine does it itself: a stage of Ray Data for it would wait until
            the stages before it leave it a core, and fall behind by more parts than it has written.
        learner: Name of a `LearnerActor`, which may start later.
        rollout: What rows need that are programs.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: LimitsConfig,
        traits: RunTraits,
        ledger: Any,
        progress: Any,
        run: str,
        commit: Callable[[str, pa.Table], None],
        others: OtherTexts,
        learner: str | None = None,
        rollout: Rollout | None = None,
    ) -> None:
        from drafter.evaluation.environment import device_name

        self._progress, self._commit = progress, commit
        self._name, self._begun = uuid.uuid4().hex, time.monotonic()
        self._unsent: dict[str, PartReport] = {}  # of parts with news since the last beat
        self._unsent_lock = threading.Lock()
        super().__init__(spec, limits, ledger)
        if self.failure is not None:
            return
        base, engine = self._lm.base, self._lm.engine
        self._device = device_name(base.device)
        verifier = engine.verifier
        self._facts = EngineFacts(base.fingerprint, verifier.name, verifier.lossless, dict(verifier.settings))
        self._traits = replace(traits, lossless=verifier.lossless)
        self._columns = wanted_columns(self._traits)
        try:
            self._start = None if rollout is None else rollout.starter(self._lm)
        except InputError as error:  # the driver has the function, and this machine has not
            self.failure = error
            self._tell("failure", one_line(error))
            return
        tags = {"run": run, "model": without_secrets(spec.model or "embedded"), "drafter": spec.drafter}
        self._metrics, self._row_metrics = EngineMetrics(tags), RowMetrics(tags)
        self._memory = MemoryFeed(engine.drafter, others, run)
        self._pulse = Pulse(BEAT_SECONDS, self._beat)
        self._beat()
        self._pulse.start()
        self._memory.start()
        if learner is not None:
            from pipeline.learning.feed import LearningFeed

            LearningFeed(self._lm, partial(find_learner, learner)).start()

    def __call__(self, block: pa.Table) -> pa.Table:
        """Generate and commit the parts in a block, and return their names.

        Raises:
            LoadError: The models cannot be loaded, by no other process either.
            JobError: The engine's process ends again and again.
            OSError: A part cannot be written.
        """
        if self.failure is not None:
            raise self.failure
        for part, rows in unpack(block):
            if not self._ledger.is_committed(part):
                self._generate(part, rows)
        return block.select(["part"])

    def _generate(self, part: str, rows: pa.Table) -> None:
        problems = rows["problem"].to_pylist()
        errors = sum(problem is not None for problem in problems)
        report = partial(self._report, part, errors)
        outcomes = self._outcomes(part, self._requests(rows, problems), report)
        found = [outcomes.get(name) for name in rows["request_id"].to_pylist()]
        problems = [one.problem if one else before for one, before in zip(found, problems, strict=True)]
        for problem in filter(None, problems):
            self._row_metrics.failed(problem["type"])
        generated = pa.array([one.generated if one else None for one in found], columns_type(self._columns))
        used = [name for name in (*PROMPT_COLUMNS, "asked", "sampling") if name in rows.column_names]
        rows = with_problems(rows, problems).drop_columns(used)
        self._commit(part, rows.append_column("generated", generated))
        report(outcomes)
        self._beat()  # the job may end before the next one
        self._ledger.commit(part)  # last: then this process may end, and the next one has nothing to do or report

    def _submit(self, work: Work) -> UnderWay:
        if isinstance(work, Request):
            return super()._submit(work)
        assert self._start is not None
        return self._start(work)

    def _requests(self, rows: pa.Table, problems: list[Any]) -> dict[str, Work]:
        if self._start is not None:
            return dict(program_rows(rows))
        names, samplings = (rows[name].to_pylist() for name in ("request_id", "sampling"))
        return {
            name: Request(prompt, SamplingParams(**json.loads(sampling)), name, self._row_seconds)
            for name, prompt, sampling, problem in zip(names, read_prompts(rows), samplings, problems, strict=True)
            if problem is None and prompt is not None
        }

    def _finished(self, result: Generation | ProgramAnswer, work: Work) -> dict[str, Any]:
        if isinstance(work, ProgramRow):
            assert isinstance(result, ProgramAnswer)
            values, calls = program_values(result, work, self._traits, self._columns), result.calls
        else:
            assert isinstance(result, Generation)
            values, calls = column_values(result, work, self._traits, self._columns), [(work, result)]
        self._row_metrics.generated(values["finish_reason"], values["generation_seconds"])
        for request, generation in calls:
            self._memory.finished(generation, request)
        return values

    def _report(self, part: str, errors: int, outcomes: Mapping[str, RowOutcome]) -> None:
        """Note a part's progress for the next beat, the whole part once it is committed.

        `errors` are rows that no engine ever sees.
        """
        generated = [outcome.generated for outcome in outcomes.values() if outcome.generated is not None]
        rows = errors + len(outcomes)
        tokens, steps = (sum(row[name] for row in generated) for name in ("num_output_tokens", "num_decode_steps"))
        with self._unsent_lock:
            self._unsent[part] = PartReport(rows, rows - len(generated), tokens, steps)

    def _beat(self) -> None:
        # One call for an engine and all of its parts: hundreds of engines report to one actor.
        state = self._lm.engine.state()
        self._metrics.show(state)
        report = EngineReport(time.monotonic() - self._begun, self._device, self._facts, state)
        with self._unsent_lock:  # and sent in order: of two reports of a part the later one counts
            parts, self._unsent = self._unsent, {}
            self._progress.beat.remote(self._name, report, parts)

    def _tell(self, kind: Kind, report: Any, sender: str | None = None) -> None:
        call = self._progress.put.remote(kind, report, sender)
        if kind in ("failure", "crash"):  # the process ends after it
            ray.wait([call], timeout=_LAST_WORD_SECONDS)


def engine_stage(
    dataset: ray.data.Dataset,
    kind: type[EngineProcess],
    arguments: Mapping[str, Any],
    engines: tuple[int, int],
    resources: ActorResources,
    *,
    rows: int,
    batch_size: int | None = None,
    at_start: int | None = None,
) -> ray.data.Dataset:
    """Add a stage of engines of a `kind`, made with `arguments`, the fewest and the most of them, to a dataset.

    A call has up to `rows` rows, in `batch_size` rows of the dataset; by default these are a block. So many engines as
    `at_start` says are asked for at once, by default the fewest, and the first one that is there begins.
    """
    fewest, most = engines
    first = at_start or fewest
    # While one call's last rows are decoded, rows of the next ones must fill the other slots.
    calls = 2 + math.ceil(arguments["spec"].config.max_num_seqs / rows)
    pool = ray.data.ActorPoolStrategy(
        min_size=fewest,
        max_size=most,
        # Engines that wait for a node are what makes Ray start nodes. Ray alone would ask for a second engine when the
        # first has finished parts, and then for at most twice as many again and again.
        initial_size=first,
        enable_true_multi_threading=True,
        max_concurrent_calls_per_actor=calls,
        # Ray adds actors when more than 1.75 calls wait for each that can run.
        max_tasks_in_flight_per_actor=2 * calls if most > first else calls + 1,
    )
    return dataset.map_batches(
        kind,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        fn_constructor_kwargs=arguments,
    )


def _die() -> None:
    """End the process at once: `sys.exit` would only end the call."""
    sys.stderr.flush()
    os._exit(1)


def watch(engine: Any, seconds: float, stuck: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls `stuck`, once, when a step of an engine takes longer than `seconds`."""

    def look() -> None:
        while engine.idle or time.monotonic() - engine.last_step <= seconds:
            time.sleep(seconds / _LOOKS)
        stuck()

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    return thread


@dataclass
class _Row:
    key: RowKey
    request: Work
    deaths: int

    @property
    def longest(self) -> int:
        """Most tokens of the request, prompt included."""
        return len(self.request.prompt_ids) + self.request.sampling.over().max_new_tokens


@dataclass
class _OpenPart:
    wanted: int
    outcomes: dict[str, RowOutcome]

    @property
    def done(self) -> bool:
        return len(self.outcomes) == self.wanted


class Feeder:
    """Feeds the rows of several parts into one engine.

    Args:
        finish: Returns the output columns of a finished request.
        ledger: A `RemoteLedger`, or a local one with its `open_part` and `exchange`.
    """

    def __init__(
        self,
        submit: Callable[[Any], UnderWay],
        finish: Callable[[Any, Any], dict[str, Any]],
        ledger: Any,
        slots: int,
    ) -> None:
        self._submit, self._finish, self._ledger = submit, finish, ledger
        self._slots, self._capacity = slots, capacity(slots)
        self._waiting: deque[_Row] = deque()
        self._suspects: deque[_Row] = deque()
        self._open: dict[str, _OpenPart] = {}
        self._left: list[tuple[_Row, UnderWay | RowError]] = []
        self._inside = 0
        self._suspect_inside = self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def generate(self, part: str, requests: Mapping[str, Work], report: Report) -> dict[str, RowOutcome]:
        """Generate a part, and return outcomes by `request_id`. Thread-safe.

        Args:
            report: Called with the outcomes so far when there are new ones, once a beat, but not with all of them.

        Raises:
            JobError: The part is being generated already: its rows would never all come back to both calls.
            Exception: The engine failed, or the ledger cannot be reached.
        """
        opened = _OpenPart(len(requests), {})
        with self._changed:
            if part in self._open:
                raise JobError(f"part {part} was given to an engine twice at once")
            self._open[part] = opened
        try:
            self._queue(part, opened, requests)
            return self._wait(opened, report)
        finally:
            del self._open[part]

    def _queue(self, part: str, opened: _OpenPart, requests: Mapping[str, Work]) -> None:
        known, deaths = self._ledger.open_part(part, len(requests))
        opened.outcomes.update({name: known[name] for name in requests if name in known})
        rows = [
            _Row(RowKey(part, name), request, deaths.get(name, 0))
            for name, request in requests.items()
            if name not in known
        ]
        # Long rows that begin early end with the others; rows of one length also read about as much of the KV cache.
        rows.sort(key=lambda row: -row.longest)
        with self._changed:
            for row in rows:
                (self._suspects if row.deaths >= ALONE_FROM else self._waiting).append(row)
            self._changed.notify_all()

    def _wait(self, opened: _OpenPart, report: Report) -> dict[str, RowOutcome]:
        reported = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: opened.done or self._failure is not None, BEAT_SECONDS)
                if self._failure is not None:
                    raise self._failure
                outcomes, done = dict(opened.outcomes), opened.done
            if done:
                return outcomes
            if len(outcomes) != reported:
                reported = len(outcomes)
                report(outcomes)

    def _run(self) -> None:
        try:
            while True:
                self._exchange()
        except Exception as error:  # whatever it is, `generate` raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _exchange(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._may_enter())
            self._changed.wait_for(self._runs_short, _PULSE_SECONDS)
            left, self._left = self._left, []
            entering = self._take()
        outcomes = {row.key: self._outcome(row, result) for row, result in left}
        may_enter = self._ledger.exchange(outcomes, [row.key for row in entering])
        with self._changed:
            for key, outcome in outcomes.items():
                self._open[key.part].outcomes[key.request_id] = outcome
            self._closed = not may_enter
            self._changed.notify_all()
        if may_enter:
            for row in entering:
                self._enter(row)

    def _runs_short(self) -> bool:
        """Return whether half of the rows that wait for a slot inside the engine are gone."""
        return self._inside - self._slots <= (self._capacity - self._slots) // 2

    def _may_enter(self) -> int:
        if self._closed or (self._suspect_inside and self._inside):
            return 0
        if self._suspects:
            return 1 if not self._inside else 0
        return min(self._capacity - self._inside, len(self._waiting))

    def _take(self) -> list[_Row]:
        count, queue = self._may_enter(), self._suspects or self._waiting
        if count:
            self._suspect_inside = queue is self._suspects
        self._inside += count
        return [queue.popleft() for _ in range(count)]

    def _enter(self, row: _Row) -> None:
        try:
            handle = self._submit(row.request)
        except RequestError as error:
            self._leave(row, RowError("Refused", str(error), row.deaths + 1))
        else:
            handle.future.add_done_callback(lambda _: self._leave(row, handle))

    def _leave(self, row: _Row, result: UnderWay | RowError) -> None:
        with self._changed:
            self._left.append((row, result))
            self._inside -= 1
            self._changed.notify_all()

    def _outcome(self, row: _Row, result: UnderWay | RowError) -> RowOutcome:
        if isinstance(result, RowError):
            return RowOutcome(problem=vars(result.problem))
        try:
            return RowOutcome(generated=self._finish(result.result(), row.request))
        except RowError as error:  # of a program
            return RowOutcome(problem=vars(replace(error.problem, attempts=row.deaths + 1)))
        except RequestError as error:
            kinds: dict[type, ProblemType] = {RequestTimeoutError: "TimedOut", NotFiniteError: "NotFinite"}
            kind = kinds.get(type(error), "Refused")
            return RowOutcome(problem=vars(RowError(kind, str(error), row.deaths + 1).problem))

"""An engine in a process of its own: parts of requests in, committed parts of generated rows out."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import ray
import ray.data

from drafter.errors import LoadError, one_line, without_secrets
from drafter.requests import Request, SamplingParams
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.feeder import Feeder, Report, UnderWay, Work
from pipeline.engines.ledger import RemoteLedger, RowOutcome
from pipeline.engines.models import EngineSpec
from pipeline.engines.shared_texts import MemoryFeed, OtherTexts
from pipeline.errors import InputError, JobError
from pipeline.io.parts import unpack, with_problems
from pipeline.io.prompts import PROMPT_COLUMNS, read_prompts
from pipeline.learning.job_learner import find_learner
from pipeline.output.columns import OutputColumn, RunTraits, column_values, columns_type, wanted_columns
from pipeline.progress.board import BEAT_SECONDS, EngineFacts, EngineReport, Kind, PartReport
from pipeline.progress.prometheus import EngineMetrics, RowMetrics
from pipeline.progress.watch import Pulse
from pipeline.settings import LimitsConfig

if TYPE_CHECKING:  # a driver imports this module, too, without the code of models
    from drafter.llm import SpeculativeLM

_LOOKS = 10  # of the watchdog per time limit
_LOAD_AGAIN_SECONDS = 5.0
_LAST_WORD_SECONDS = 5


class Programs(Protocol):
    """What makes programs of a job's rows; see `pipeline.generate.rollout.Rollout`."""

    def rows(self, rows: pa.Table) -> Mapping[str, Work]:
        """Return the programs of a part, by their rows' names."""

    def starter(self, lm: SpeculativeLM) -> Callable[[Any], UnderWay]:
        """Return what starts a program; `InputError` if that cannot be done on this machine."""

    def values(self, answer: Any, row: Any, traits: RunTraits, columns: Sequence[OutputColumn]) -> dict[str, Any]:
        """Return the output columns of a program that has ended with this answer, whose `calls` are generations."""


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
        rollout: Programs | None = None,
    ) -> None:
        from drafter.evaluation.environment import device_name

        self._progress, self._commit = progress, commit
        self._name, self._begun = uuid.uuid4().hex, time.monotonic()
        self._unsent: dict[str, PartReport] = {}  # of parts with news since the last beat
        self._unsent_lock = threading.Lock()
        self._sent: Any = None  # the last beat's call
        super().__init__(spec, limits, ledger)
        if self.failure is not None:
            return
        base, engine = self._lm.base, self._lm.engine
        self._device = device_name(base.device)
        verifier = engine.verifier
        how = (verifier.name, verifier.lossless, dict(verifier.settings))
        self._facts = EngineFacts(base.fingerprint, base.weights, *how)
        self._traits = replace(traits, lossless=verifier.lossless)
        self._columns = wanted_columns(self._traits)
        try:
            self._programs, self._start = rollout, None if rollout is None else rollout.starter(self._lm)
        except InputError as error:  # the driver has the function, and this machine has not
            self.failure = error
            self._tell("failure", one_line(error))
            return
        tags = {"run": run, "model": without_secrets(spec.model or "embedded"), "drafter": spec.drafter}
        self._metrics, self._row_metrics = EngineMetrics(tags), RowMetrics(tags)
        self._memory = MemoryFeed(engine.memories, others, run)
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
        self._beat(always=True)  # the job may end before the next one
        self._ledger.commit(part)  # last: then this process may end, and the next one has nothing to do or report

    def _submit(self, work: Work) -> UnderWay:
        return super()._submit(work) if self._start is None else self._start(work)

    def _requests(self, rows: pa.Table, problems: list[Any]) -> dict[str, Work]:
        if self._programs is not None:
            return dict(self._programs.rows(rows))
        names, samplings = (rows[name].to_pylist() for name in ("request_id", "sampling"))
        return {
            name: Request(prompt, SamplingParams(**json.loads(sampling)), name, self._row_seconds)
            for name, prompt, sampling, problem in zip(names, read_prompts(rows), samplings, problems, strict=True)
            if problem is None and prompt is not None
        }

    def _finished(self, result: Any, work: Any) -> dict[str, Any]:
        if self._programs is not None:
            values, calls = self._programs.values(result, work, self._traits, self._columns), result.calls
        else:
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

    def _beat(self, always: bool = False) -> None:
        # One call for an engine and all of its parts: hundreds of engines report to one actor.
        state = self._lm.engine.state()
        self._metrics.show(state)
        report = EngineReport(time.monotonic() - self._begun, self._device, self._facts, state)
        with self._unsent_lock:  # and sent in order: of two reports of a part the later one counts
            if not always and self._sent is not None and not ray.wait([self._sent], timeout=0)[0]:
                return  # the board is busy: what is new waits for the next beat
            parts, self._unsent = self._unsent, {}
            self._sent = self._progress.beat.remote(self._name, report, parts)

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

"""Ray Data actor around an engine, with a watchdog for steps that hang."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import ray

from drafter.errors import LoadError, one_line
from drafter.evaluation.environment import device_name
from drafter.requests import Generation, Request, SamplingParams
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import Feeder
from pipeline.engines.ledger import RemoteLedger, RowOutcome
from pipeline.engines.shared_texts import MemoryFeed, OtherTexts
from pipeline.errors import JobError
from pipeline.learning.feed import LearningFeed
from pipeline.learning.job_learner import find_learner
from pipeline.output.columns import RunTraits, column_values, columns_type, slot_seconds, wanted_columns
from pipeline.progress.board import BEAT_SECONDS, EngineFacts, EngineReport, Kind, PartReport
from pipeline.progress.prometheus import EngineMetrics, RowMetrics
from pipeline.progress.watch import Pulse
from pipeline.settings import LimitsConfig
from pipeline.staging.rows import with_problems
from pipeline.staging.staging import pack, unpack

_LOOKS = 10
"""Looks of the watchdog per time limit."""


class Stepping(Protocol):
    """The watchdog's view of an engine; `last_step` is the end of its last step by `time.monotonic`."""

    last_step: float

    @property
    def idle(self) -> bool:
        """True if it has nothing to do."""


def watch(engine: Stepping, seconds: float, stuck: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls `stuck`, once, when a step takes longer than `seconds`."""

    def look() -> None:
        while engine.idle or time.monotonic() - engine.last_step <= seconds:
            time.sleep(seconds / _LOOKS)
        stuck()

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    return thread


_LOAD_AGAIN_SECONDS = 5.0
_LAST_WORD_SECONDS = 5


class EngineActor:
    """Turns parts of requests into parts of generated rows.

    Args:
        run: The job's name in metrics: its output.
        learner: Name of the `LearnerActor`, which may start later; None without learning.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: LimitsConfig,
        traits: RunTraits,
        ledger: Any,
        progress: Any,
        run: str,
        others: OtherTexts,
        learner: str | None = None,
    ) -> None:
        self._progress = progress
        self._name, self._begun = uuid.uuid4().hex, time.monotonic()
        self._pulse = Pulse(BEAT_SECONDS, self._beat)
        self._failure: Exception | None = None
        remote_ledger = RemoteLedger(ledger)
        # An error here would make Ray retry what cannot succeed, so the first call raises it.
        if not remote_ledger.arrive():
            self._failure = JobError("an engine's process ended again and again without finishing a row")
            return
        self._failure = self._load(spec, remote_ledger)
        if self._failure is not None:
            self._tell("failure", one_line(self._failure))
            return
        base, engine = self._lm.base, self._lm.engine
        self._device = device_name(base.device)
        self._facts = EngineFacts(
            base.fingerprint, engine.verifier.name, engine.verifier.lossless, dict(engine.verifier.settings)
        )
        self._traits = replace(traits, lossless=self._facts.lossless)
        self._columns = wanted_columns(self._traits)
        tags = {"run": run, "model": spec.model or "embedded", "drafter": spec.drafter}
        self._metrics, self._row_metrics = EngineMetrics(engine.state, tags), RowMetrics(tags)
        self._memory = MemoryFeed(engine.drafter, others, run)
        self._feeder = Feeder(
            self._lm.submit, self._finished, remote_ledger, spec.config.max_num_seqs, limits.row_attempts
        )
        self._row_seconds = limits.row_seconds
        stuck = RuntimeError(f"a step took longer than limits.step_seconds, {limits.step_seconds:g}")
        watch(engine, limits.step_seconds, partial(self._end, stuck))
        self._beat()
        self._pulse.start()
        self._memory.start()
        if learner is not None:
            LearningFeed(self._lm, partial(find_learner, learner)).start()

    def _load(self, spec: EngineSpec, ledger: RemoteLedger) -> LoadError | None:
        """Load the models, and return the error if that fails.

        If another engine could load them, the failure is this machine's, and the process ends so that Ray may try
        another.
        """
        try:
            self._lm = spec.load(partial(self._tell, "stage"))
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, LoadError):
                failure = error
            else:  # such as too little memory
                failure = LoadError(f"the models cannot be loaded: {type(error).__name__}: {error}")
            if ledger.has_loaded():
                time.sleep(_LOAD_AGAIN_SECONDS)
                self._end(failure)
            return failure
        here = self._lm.base.fingerprint
        first = ledger.loaded(here)
        if here != first:
            return LoadError(f"the model's weights ({here}) are not those of the output's other rows ({first})")
        return None

    def __call__(self, block: pa.Table) -> pa.Table:
        """Generate the parts in a block.

        If the engine fails, the process ends, so that Ray starts another and gives it the parts again.

        Raises:
            LoadError: The models could not be loaded.
            JobError: The engine's process ends again and again, or has a part twice.
        """
        if self._failure is not None:
            raise self._failure
        return pack((part, self._generate(part, rows)) for part, rows in unpack(block))

    def _generate(self, part: str, rows: pa.Table) -> pa.Table:
        problems = rows["problem"].to_pylist()
        errors = sum(problem is not None for problem in problems)
        try:
            outcomes = self._feeder.generate(part, self._requests(rows, problems), partial(self._report, part, errors))
        except JobError:  # another process would be given the same parts
            raise
        except Exception as error:
            traceback.print_exc()
            self._end(error)
        found = [outcomes.get(name) for name in rows["request_id"].to_pylist()]
        problems = [one.problem if one else before for one, before in zip(found, problems, strict=True)]
        for problem in filter(None, problems):
            self._row_metrics.failed(problem["type"])
        generated = pa.array([one.generated if one else None for one in found], columns_type(self._columns))
        self._beat()  # the job may end before the next one
        rows = with_problems(rows, problems).drop_columns(["prompt_ids", "sampling"])
        return rows.append_column("generated", generated)

    def _requests(self, rows: pa.Table, problems: list[Any]) -> dict[str, Request]:
        columns = (rows[name].to_pylist() for name in ("request_id", "prompt_ids", "sampling"))
        return {
            name: Request(prompt_ids, SamplingParams(**json.loads(sampling)), name, self._row_seconds)
            for name, prompt_ids, sampling, problem in zip(*columns, problems, strict=True)
            if problem is None
        }

    def _finished(self, generation: Generation, request: Request) -> dict[str, Any]:
        self._row_metrics.generated(generation.finish_reason, slot_seconds(generation))
        self._memory.finished(generation, request)
        return column_values(generation, request, self._traits, self._columns)

    def _report(self, part: str, errors: int, outcomes: Mapping[str, RowOutcome]) -> None:
        """Report a part's progress; the engine never sees the `errors` among its rows."""
        generated = [outcome.generated for outcome in outcomes.values() if outcome.generated is not None]
        rows = errors + len(outcomes)
        tokens, steps = (sum(row[name] for row in generated) for name in ("num_output_tokens", "num_decode_steps"))
        self._tell("part", PartReport(rows, rows - len(generated), tokens, steps), part)

    def _beat(self) -> None:
        self._metrics.publish()
        seconds = time.monotonic() - self._begun
        report = EngineReport(seconds, self._device, self._facts, self._lm.engine.state())
        self._tell("engine", report, self._name)

    def _end(self, why: Exception) -> None:
        self._tell("crash", f"{type(why).__name__}: {one_line(why)}")
        _die()

    def _tell(self, kind: Kind, report: Any, sender: str | None = None) -> None:
        call = self._progress.put.remote(kind, report, sender)
        if kind in ("failure", "crash"):  # the process ends after it
            ray.wait([call], timeout=_LAST_WORD_SECONDS)


def _die() -> None:
    """End the process at once: `sys.exit` would only end the call."""
    sys.stderr.flush()
    os._exit(1)

"""Ray Data's actor around the engine.

Several calls run at once, each with one part; all feed one engine, so that its slots stay full while one part ends
and the next begins. A call returns its rows in the order they came, as one block: a call that Ray repeats after
a death must give the same rows in the same blocks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import torch

from drafter.engine.engine_config import EngineConfig
from drafter.errors import LoadError, one_line
from drafter.evaluation.environment import device_name
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request, SamplingParams, Timing
from drafter.statistics import DecodeCounts, statistics_columns
from pipeline.engines.feeder import Feeder
from pipeline.engines.ledger import Outcome, RowKey
from pipeline.engines.logprobs_column import LOGPROBS_TYPE, logprobs_value
from pipeline.engines.watchdog import watch
from pipeline.errors import JobError
from pipeline.generate.generate_config import LimitsConfig
from pipeline.generate.staged_input import PROBLEM_TYPE
from pipeline.progress.board import BEAT_SECONDS, EngineReport, PartReport
from pipeline.progress.prometheus import EngineMetrics, RowMetrics
from pipeline.progress.pulse import Pulse

TIMING_COLUMNS = ("generation_seconds", "finished_at")
"""The output columns that differ when a row is made again: how long it took in its slot, and when that was."""
_LOAD_AGAIN_SECONDS = 5.0


@dataclass(frozen=True)
class EngineSpec:
    """What an actor loads.

    Args:
        model: Hub id or folder; None is the embedded base.
        drafter: As in `SpeculativeLM.from_pretrained`.
        loading: Further arguments of `SpeculativeLM.from_pretrained`.
        config: The engine's sizes.
        threads: CPU threads: the actor's share of the machine.
    """

    model: str | None
    drafter: str
    loading: dict[str, Any]
    config: EngineConfig
    threads: int

    def load(self) -> SpeculativeLM:
        """Load the models and start the engine.

        Raises:
            LoadError: They cannot be loaded.
        """
        torch.set_num_threads(self.threads)
        return SpeculativeLM.from_pretrained(self.model, self.drafter, config=self.config, **self.loading)


class RemoteLedger:
    """The ledger, as an engine's process sees it.

    Args:
        actor: A `Ledger` actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._engine = ray.get_runtime_context().get_actor_id()

    def arrive(self) -> bool:
        """See `Ledger.arrive`; a process that replaces a dead one has its actor's name."""
        return bool(ray.get(self._actor.arrive.remote(self._engine)))

    def loaded(self, base: str) -> str:
        """See `Ledger.loaded`."""
        return str(ray.get(self._actor.loaded.remote(base)))

    def has_loaded(self) -> bool:
        """See `Ledger.has_loaded`."""
        return bool(ray.get(self._actor.has_loaded.remote()))

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, Outcome], dict[str, int]]:
        """See `Ledger.open_part`."""
        outcomes, deaths = ray.get(self._actor.open_part.remote(part, wanted))
        return outcomes, deaths

    def exchange(self, left: Mapping[RowKey, Outcome], entering: list[RowKey]) -> bool:
        """See `Ledger.exchange`."""
        return bool(ray.get(self._actor.exchange.remote(self._engine, left, entering)))


class EngineActor:
    """Generates for tables of requests.

    Args:
        spec: What to load.
        limits: When a row, or a step of the engine, is given up.
        ledger: A `Ledger` actor.
        progress: A `ProgressBoard` actor.
        run: The job's name in metrics: its output.
    """

    def __init__(self, spec: EngineSpec, limits: LimitsConfig, ledger: Any, progress: Any, run: str) -> None:
        self._progress = progress
        self._name, self._begun = uuid.uuid4().hex, time.monotonic()
        self._pulse = Pulse(BEAT_SECONDS, self._beat)
        self._failure: Exception | None = None
        remote_ledger = RemoteLedger(ledger)
        # An error here would have Ray retry what cannot succeed, so it is raised by the first call.
        if not remote_ledger.arrive():
            self._failure = JobError("an engine's process ended again and again without finishing a row")
            return
        self._failure = self._load(spec, remote_ledger)
        if self._failure is not None:
            self._tell("failed", one_line(self._failure))
            return
        base, engine = self._lm.base, self._lm.engine
        tags = {"run": run, "model": spec.model or "embedded", "drafter": spec.drafter}
        self._metrics, self._rows = EngineMetrics(engine, tags), RowMetrics(tags)
        self._device, self._fingerprint = device_name(base.device), base.fingerprint
        self._feeder = Feeder(self._lm.submit, self._finished, remote_ledger, spec.config.slots, limits.row_attempts)
        self._row_seconds = limits.row_seconds
        stuck = RuntimeError(f"a step took longer than limits.step_seconds, {limits.step_seconds:g}")
        watch(engine, limits.step_seconds, partial(self._end, stuck))
        self._beat()
        self._pulse.start()

    def _load(self, spec: EngineSpec, ledger: RemoteLedger) -> LoadError | None:
        """Load the models; where others could, a failure is this machine's, and ends the process to try another."""
        try:
            self._lm = spec.load()
        except Exception as error:
            failure = LoadError(f"the models cannot be loaded: {type(error).__name__}: {error}")  # out of memory, say
            if isinstance(error, LoadError):
                failure = error
            traceback.print_exc()
            if ledger.has_loaded():
                time.sleep(_LOAD_AGAIN_SECONDS)
                self._end(failure)
            return failure
        here, first = self._lm.base.fingerprint, ledger.loaded(self._lm.base.fingerprint)
        if here != first:
            return LoadError(f"the model's weights ({here}) are not those of the output's other rows ({first})")
        return None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Add `generated` (a struct of the output columns) to rows with `prompt_ids` and `sampling`.

        Rows that cannot be generated get a `problem` and a null instead. An engine that fails ends the process, so
        that Ray starts another and gives it the rows again.

        Raises:
            LoadError: The models could not be loaded.
            JobError: The engine's process ends again and again.
        """
        if self._failure is not None:
            raise self._failure
        problems = table["problem"].to_pylist()
        requests, part = self._requests(table, problems), table["part"][0].as_py()
        errors = sum(problem is not None for problem in problems)
        try:
            outcomes = self._feeder.generate(part, requests, partial(self._report, part, errors))
        except Exception as error:
            traceback.print_exc()
            self._end(error)
        names = table["request_id"].to_pylist()
        rows = [outcomes[name].generated if name in outcomes else None for name in names]
        problems = [
            outcomes[name].problem if name in outcomes else problem
            for name, problem in zip(names, problems, strict=True)
        ]
        for problem in filter(None, problems):
            self._rows.failed(problem["type"])
        problem = pa.array(problems, PROBLEM_TYPE)
        table = table.set_column(table.schema.get_field_index("problem"), "problem", problem)
        return table.drop_columns(["prompt_ids", "sampling"]).append_column("generated", pa.array(rows, OUTPUT_TYPE))

    def _requests(self, table: pa.Table, problems: list[Any]) -> dict[str, Request]:
        """The rows without a problem, by their names."""
        rows = zip(*(table[name].to_pylist() for name in ("request_id", "prompt_ids", "sampling")), strict=True)
        return {
            request_id: Request(prompt_ids, SamplingParams(**json.loads(sampling)), request_id, self._row_seconds)
            for (request_id, prompt_ids, sampling), problem in zip(rows, problems, strict=True)
            if problem is None
        }

    def _report(self, part: str, errors: int, outcomes: Mapping[str, Outcome]) -> None:
        """Say how far a part is; `errors` of its rows no engine has to see."""
        generated = [outcome.generated for outcome in outcomes.values() if outcome.generated is not None]
        rows = errors + len(outcomes)
        tokens, steps = (sum(row[name] for row in generated) for name in ("num_output_tokens", "num_decode_steps"))
        self._tell("update", part, PartReport(rows, rows - len(generated), tokens, steps))

    def _finished(self, generation: Generation, request: Request) -> dict[str, Any]:
        """What a request that has just finished adds to its row."""
        self._rows.generated(generation.finish_reason, slot_seconds(generation.timing))
        return output_columns(generation, request)

    def _beat(self) -> None:
        """Show how the engine is."""
        self._metrics.publish()
        state = self._lm.engine.state()
        report = EngineReport(
            seconds=time.monotonic() - self._begun,
            device=self._device,
            fingerprint=self._fingerprint,
            slots=state.slots,
            active=state.active,
            waiting=state.waiting,
        )
        self._tell("engine", self._name, report)

    def _end(self, why: Exception) -> None:
        self._tell("crashed", f"{type(why).__name__}: {one_line(why)}")
        _die()

    def _tell(self, method: str, *arguments: Any) -> None:
        call = getattr(self._progress, method).remote(*arguments)
        if method in ("failed", "crashed"):  # the process ends after it
            ray.wait([call], timeout=5)


def _die() -> None:
    """End the process at once: `sys.exit` would only end the call."""
    sys.stderr.flush()
    os._exit(1)


def output_columns(generation: Generation, request: Request) -> dict[str, Any]:
    """What a request that has just finished adds to its row."""
    return {
        "text": generation.text,
        "prompt_token_ids": list(request.prompt_ids),
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "num_prompt_tokens": generation.prompt_tokens,
        "num_output_tokens": len(generation.token_ids),
        "seed": request.sampling.seed,
        **statistics_columns(generation.counts),
        "generation_seconds": slot_seconds(generation.timing),
        "finished_at": datetime.now(UTC),
        "logprobs": logprobs_value(generation.logprobs),
    }


def slot_seconds(timing: Timing) -> float:
    """How long a request was in its slot, its prefill and what it waited after a preemption included."""
    return timing.total - timing.queued if timing.queued is not None else 0.0


def _output_type() -> pa.StructType:
    kinds: dict[type, pa.DataType] = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        list: pa.list_(pa.int64()),
        datetime: pa.timestamp("ms", "UTC"),
        type(None): LOGPROBS_TYPE,
    }
    example = output_columns(Generation("", [], "", "stop", 0, DecodeCounts()), Request([]))
    return pa.struct([(name, kinds[type(value)]) for name, value in example.items()])


OUTPUT_TYPE = _output_type()
"""Arrow type of the columns that a finished request adds to its row."""

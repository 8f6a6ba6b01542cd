"""Ray Data's actor around the engine.

Several calls run at once, each with one part; all submit into one engine, so that its slots stay full while one part
ends and the next begins. A call returns its rows in the order they came, as one block: a call that Ray repeats after
a death must give the same rows in the same blocks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import uuid
from concurrent.futures import as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import ray
import torch

from drafter.engine import EngineConfig
from drafter.errors import LoadError, RequestError
from drafter.evaluation.environment import device_name
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request, SamplingParams, Timing
from drafter.slots import Handle
from drafter.statistics import DecodeCounts, statistics_columns
from pipeline.errors import RowError, one_line
from pipeline.metrics import EngineMetrics, Pulse, RowMetrics
from pipeline.progress import BEAT_SECONDS, EngineReport, PartReport
from pipeline.staging import PROBLEM_TYPE

TIMING_COLUMNS = ("generation_seconds", "finished_at")
"""The output columns that differ when a row is made again: how long it took in its slot, and when that was."""
_REPORT_SECONDS = 0.25


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


class EngineActor:
    """Generates for tables of requests.

    Args:
        spec: What to load.
        progress: A `ProgressBoard` actor, or None.
        run: The job's name in metrics: its output.
    """

    def __init__(self, spec: EngineSpec, progress: Any = None, run: str = "") -> None:
        self._progress = progress
        self._begun = time.monotonic()
        self._name = uuid.uuid4().hex
        self._failure: LoadError | None = None
        try:
            self._lm = spec.load()
        except LoadError as error:
            self._failure = error
        except Exception as error:  # out of memory, say
            traceback.print_exc()
            self._failure = LoadError(f"the models cannot be loaded: {type(error).__name__}: {error}")
        # An error here would have Ray retry what cannot succeed, so it is raised by the first call.
        if self._failure is not None:
            self._tell("failed", one_line(self._failure))
        else:
            tags = {"run": run, "model": spec.model or "embedded", "drafter": spec.drafter}
            self._metrics, self._rows = EngineMetrics(self._lm.engine, tags), RowMetrics(tags)
            base = self._lm.base
            self._device, self._fingerprint = device_name(base.device), base.fingerprint
            Pulse(BEAT_SECONDS, self._beat)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Add `generated` (a struct of the output columns) to rows with `prompt_ids` and `sampling`.

        Rows that the engine refuses get a `problem` and a null instead. An engine that fails ends the process, so
        that Ray starts another and gives it the rows again.

        Raises:
            LoadError: The models could not be loaded.
        """
        if self._failure is not None:
            raise self._failure
        try:
            problems, handles = self._submit(table)
            kinds = [problem["type"] for problem in problems if problem is not None]
            for kind in kinds:
                self._rows.failed(kind)
            generated = self._watch(table["part"][0].as_py(), handles, errors=len(kinds))
        except Exception as error:
            traceback.print_exc()
            self._tell("crashed", f"{type(error).__name__}: {one_line(error)}")
            _die()
        rows = [generated.get(index) for index in range(table.num_rows)]
        problem = pa.array(problems, PROBLEM_TYPE)
        table = table.set_column(table.schema.get_field_index("problem"), "problem", problem)
        return table.drop_columns(["prompt_ids", "sampling"]).append_column("generated", pa.array(rows, OUTPUT_TYPE))

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

    def _submit(self, table: pa.Table) -> tuple[list[Any], dict[int, Handle]]:
        problems = table["problem"].to_pylist()
        handles: dict[int, Handle] = {}
        requests = zip(*(table[name].to_pylist() for name in ("request_id", "prompt_ids", "sampling")), strict=True)
        for index, (request_id, prompt_ids, sampling) in enumerate(requests):
            if problems[index] is not None:
                continue
            try:
                request = Request(prompt_ids, SamplingParams(**json.loads(sampling)), request_id)
                handles[index] = self._lm.submit(request)
            except RequestError as error:
                problems[index] = vars(RowError("Refused", str(error)).problem)
        return problems, handles

    def _watch(self, part: str, handles: dict[int, Handle], errors: int) -> dict[int, dict[str, Any]]:
        """Wait for all requests, and report how far they are now and then; return what they add to their rows."""
        done, last = PartReport(errors, errors), 0.0
        places = {handle.future: index for index, handle in handles.items()}
        rows = {}
        for future in as_completed(places):
            generation, index = future.result(), places[future]
            rows[index] = output_columns(generation, handles[index].request)
            done = done.plus(PartReport(1, 0, len(generation.token_ids), generation.counts.num_decode_steps))
            self._rows.generated(generation.finish_reason, slot_seconds(generation.timing))
            if time.monotonic() - last > _REPORT_SECONDS:
                self._tell("update", part, done)
                last = time.monotonic()
        self._tell("update", part, done)
        return rows

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._progress is None:
            return
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
    }
    example = output_columns(Generation("", [], "", "stop", 0, DecodeCounts()), Request([]))
    return pa.struct([(name, kinds[type(value)]) for name, value in example.items()])


OUTPUT_TYPE = _output_type()
"""Arrow type of the columns that a finished request adds to its row."""

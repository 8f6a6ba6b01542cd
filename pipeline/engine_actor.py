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
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import torch

from drafter.engine import EngineConfig
from drafter.errors import LoadError, RequestError
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request, SamplingParams
from drafter.slots import Handle
from drafter.statistics import DecodeCounts, statistics_columns
from pipeline.errors import RowError, one_line
from pipeline.logprobs import LOGPROBS_TYPE, logprobs_value
from pipeline.staging import PROBLEM_TYPE

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
    """

    def __init__(self, spec: EngineSpec, progress: Any = None) -> None:
        self._progress = progress
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
            self._tell("loaded", self._lm.base.fingerprint)

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
            self._watch(table["part"][0].as_py(), handles, errors=sum(problem is not None for problem in problems))
            results = {index: handle.result() for index, handle in handles.items()}
        except Exception as error:
            traceback.print_exc()
            self._tell("crashed", f"{type(error).__name__}: {one_line(error)}")
            _die()
        rows = [
            output_columns(results[index], handles[index].request) if index in results else None
            for index in range(table.num_rows)
        ]
        problem = pa.array(problems, PROBLEM_TYPE)
        table = table.set_column(table.schema.get_field_index("problem"), "problem", problem)
        return table.drop_columns(["prompt_ids", "sampling"]).append_column("generated", pa.array(rows, OUTPUT_TYPE))

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

    def _watch(self, part: str, handles: dict[int, Handle], errors: int) -> None:
        """Wait for all requests, and report how far they are now and then."""
        rows, tokens, last = errors, 0, 0.0
        for future in as_completed(handle.future for handle in handles.values()):
            rows += 1
            tokens += len(future.result().token_ids)
            if time.monotonic() - last > _REPORT_SECONDS:
                self._tell("update", part, rows, errors, tokens)
                last = time.monotonic()
        self._tell("update", part, rows, errors, tokens)

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
    """What a finished request adds to its row."""
    return {
        "text": generation.text,
        "prompt_token_ids": list(request.prompt_ids),
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "num_prompt_tokens": generation.prompt_tokens,
        "num_output_tokens": len(generation.token_ids),
        "seed": request.sampling.seed,
        **statistics_columns(generation.counts),
        "logprobs": logprobs_value(generation.logprobs),
    }


def _output_type() -> pa.StructType:
    kinds: dict[type, Callable[[], pa.DataType]] = {str: pa.string, int: pa.int64, float: pa.float64}
    example = output_columns(Generation("", [], "", "stop", 0, DecodeCounts()), Request([]))
    return pa.struct(
        [
            (name, pa.list_(pa.int64()) if isinstance(value, list) else kinds[type(value)]())
            for name, value in example.items()
            if name != "logprobs"
        ]
        + [("logprobs", LOGPROBS_TYPE)]
    )


OUTPUT_TYPE = _output_type()
"""Arrow type of the columns that a finished request adds to its row."""

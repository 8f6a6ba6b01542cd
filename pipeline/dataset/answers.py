"""The actor of a generation stage: rows of a block go into one engine, and come back with their texts."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from drafter.errors import LoadError, RequestError, one_line
from drafter.requests import Generation, Request, SamplingParams
from pipeline.engines.engine_spec import EngineSpec
from pipeline.engines.feeder import Feeder
from pipeline.engines.ledger import RemoteLedger, RowOutcome
from pipeline.errors import InputError, JobError, RowError
from pipeline.generate.row_requests import row_messages, row_sampling
from pipeline.output.columns import RunTraits, column_values, columns_type, wanted_columns
from pipeline.settings import LimitsConfig, WritingConfig

if TYPE_CHECKING:
    from drafter.llm import SpeculativeLM

ERROR_COLUMN = "__inference_error__"
"""Why a row has no text; an empty string where it has one."""
_PROMPTS = ("messages", "prompt", "prompt_token_ids")
_SETTINGS = "sampling_params"
_NAMES = ("request_id", "id")
"""Columns that tell rows apart: the seed of a row follows from the first that there is."""


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of a stage's rows, beside those of its engines."""

    sampling: SamplingParams
    limits: LimitsConfig


class Answers:
    """Generates for blocks of rows; several blocks are in the engine at once.

    Args:
        ledger: A `Ledger` actor: a row that ends its engine's process again and again becomes an error.
    """

    def __init__(self, spec: EngineSpec, settings: AnswerSettings, ledger: Any) -> None:
        from pipeline.engines.engine_actor import watch  # an engine's process alone imports it

        self._settings, self._ledger_actor = settings, ledger
        remote = RemoteLedger(ledger)
        self._failure: Exception | None = None
        # An error here would make Ray retry what cannot succeed, so the first call raises it.
        if not remote.arrive():
            self._failure = JobError("an engine's process ended again and again without finishing a row")
            return
        try:
            self._lm: SpeculativeLM = spec.load()
        except LoadError as error:
            self._failure = error
            return
        traits = RunTraits(settings.sampling, WritingConfig(), rows_have_settings=True, drafter=spec.drafter)
        self._traits, self._columns = traits, wanted_columns(traits)
        engine = self._lm.engine
        self._feeder = Feeder(
            self._lm.submit, self._finished, remote, spec.config.max_num_seqs, settings.limits.row_attempts
        )
        watch(engine, settings.limits.step_seconds, partial(_end, RuntimeError("a step of the engine hangs")))

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the block with the columns of `pipeline.output.columns` and `__inference_error__`.

        Raises:
            LoadError: The models could not be loaded.
            InputError: The dataset has none of the columns of a prompt, or one that would be replaced.
            JobError: The engine's process ends again and again.
        """
        if self._failure is not None:
            raise self._failure
        kind = next((name for name in _PROMPTS if name in block.column_names), None)
        if kind is None and not block.num_rows:  # an empty block may have no columns at all
            return block
        if kind is None:
            raise InputError(f"rows need a column {', '.join(_PROMPTS[:-1])} or {_PROMPTS[-1]}: make it in preprocess")
        added = columns_type([one for one in self._columns if one.name != kind])
        if taken := {ERROR_COLUMN, *added.names} & set(block.column_names) - {"seed"}:
            raise InputError(f"column {min(taken)} would be replaced: rename it in preprocess")
        rows = block.select([name for name in block.column_names if name in _READ]).to_pylist()
        requests, problems = self._requests(rows, kind)
        outcomes = self._generate({request.request_id: request for request in requests.values()})
        found = [outcomes.get(requests[place].request_id) if place in requests else None for place in range(len(rows))]
        for place, one in enumerate(found):
            if one is not None and one.problem is not None:
                problems[place] = one.problem["message"]
        generated = pa.array([None if one is None else one.generated for one in found], columns_type(self._columns))
        if "seed" in block.column_names:
            block = block.drop_columns(["seed"])
        for column, values in zip(added, generated.flatten(), strict=True):  # null where the row is
            block = block.append_column(column.name, values)
        errors = [problems.get(place, "") for place in range(len(rows))]
        return block.append_column(ERROR_COLUMN, pa.array(errors, pa.string()))

    def _requests(self, rows: list[dict[str, Any]], kind: str) -> tuple[dict[int, Request], dict[int, str]]:
        """Return requests and errors by the rows' places."""
        requests, problems = {}, {}
        for place, row in enumerate(rows):
            try:
                ids = self._encode(row.get(kind), kind)
                name = self._name(row, place, ids)
                sampling = row_sampling(self._settings.sampling, name, row, _SETTINGS)
                requests[place] = Request(ids, sampling, f"{place}:{name}", self._settings.limits.row_seconds)
            except (RowError, RequestError) as error:
                problems[place] = one_line(error)
        return requests, problems

    def _encode(self, value: Any, kind: str) -> list[int]:
        if value is None:
            raise RowError("BadPrompt", f"column {kind!r} is empty")
        return self._lm.encode(row_messages(value, kind) if kind == "messages" else value)

    @staticmethod
    def _name(row: Mapping[str, Any], place: int, ids: list[int]) -> str:
        """Return what a row's seed follows from: its name, or its place in the batch and its prompt."""
        given = next((row[name] for name in _NAMES if row.get(name) is not None), None)
        if given is not None:
            return str(given)
        return f"{place}#{hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest()}"

    def _generate(self, requests: dict[str, Request]) -> dict[str, RowOutcome]:
        # A task that is tried again has the same id, and finds the rows that the engine before had finished.
        part = ray.get_runtime_context().get_task_id()
        try:
            outcomes = self._feeder.generate(part, requests, lambda _: None)
        except JobError:
            raise
        except Exception as error:
            traceback.print_exc()
            _end(error)
        self._ledger_actor.commit.remote(part)
        return outcomes

    def _finished(self, generation: Generation, request: Request) -> dict[str, Any]:
        return column_values(generation, request, self._traits, self._columns)


_READ = frozenset([*_PROMPTS, *_NAMES, _SETTINGS, "seed"])


def _end(why: Exception) -> None:
    """End the process at once, so that Ray starts another and gives it the rows again."""
    print(f"{type(why).__name__}: {one_line(why)}", file=sys.stderr, flush=True)
    os._exit(1)

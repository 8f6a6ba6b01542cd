"""Output columns that generation adds to a row, all declared in `COLUMNS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import pyarrow as pa

from drafter.prompt import Prompt
from drafter.requests import Generation, Request, SamplingParams, TokenLogprob
from drafter.statistics import draft_acceptance_rate, mean_acceptance_length
from pipeline.io.column_types import conform, infer_column, python_rows, seen_types, unify, whole

_TOKEN = [("token_id", pa.int64()), ("logprob", pa.float64())]
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))


def _logprobs_value(logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    if logprobs is None:
        return None
    return [
        {**vars(one), "top": [{"token_id": token, "logprob": logprob} for token, logprob in one.top]}
        for one in logprobs
    ]


def logprobs_of(value: list[dict[str, Any]] | None) -> list[TokenLogprob] | None:
    """Read a value of the column `logprobs`."""
    if value is None:
        return None
    return [
        TokenLogprob(one["token_id"], one["logprob"], tuple((top["token_id"], top["logprob"]) for top in one["top"]))
        for one in value
    ]


PROMPT_IMAGES = "prompt_images"
"""Column of where in a prompt's tokens its images stand."""
_SPANS = pa.list_(pa.struct([("start", pa.int64()), ("stop", pa.int64()), ("digest", pa.string())]))


def _spans_value(request: Request) -> list[dict[str, Any]]:
    """Return where in the prompt's tokens its images stand, and the digests of these."""
    spans = request.prompt.spans if isinstance(request.prompt, Prompt) else ()
    return [{"start": span.start, "stop": span.stop, "digest": span.digest.hex()} for span in spans]


@dataclass(frozen=True)
class RunTraits:
    """Traits of a run that select its optional output columns.

    Args:
        lossless: Whether the engine's verifier is lossless; otherwise every row is marked.
        learning: Whether a head learns from the rows, so that rows are drafted with different versions of it.
        images: Whether rows may have images.
        reasons: Whether the target model may reason before its answer.
        program: Whether rows are programs, whose columns are sums over several calls.
    """

    sampling: SamplingParams
    rows_have_settings: bool
    drafter: str = "none"
    lossless: bool = True
    learning: bool = False
    images: bool = False
    reasons: bool = False
    program: bool = False


@dataclass(frozen=True)
class OutputColumn:
    """A column that generation adds to a row."""

    name: str
    type: pa.DataType
    value: Callable[[Generation, Request, RunTraits], Any]
    wanted: Callable[[RunTraits], bool] = lambda run: True


def slot_seconds(generation: Generation) -> float:
    """Return a request's seconds in its slot, including its prefill and any wait after a preemption."""
    timing = generation.timing
    return timing.total - timing.queued if timing.queued is not None else 0.0


def _lenient(run: RunTraits) -> bool:
    return not run.lossless


def _structured(run: RunTraits) -> bool:
    return run.sampling.structured_outputs is not None or run.rows_have_settings or run.program


_TEXT, _INTEGER, _FLOAT, _INTEGERS = pa.string(), pa.int64(), pa.float64(), pa.list_(pa.int64())

COLUMNS = (
    OutputColumn("text", _TEXT, lambda g, r, run: g.text),
    OutputColumn("reasoning_content", _TEXT, lambda g, r, run: g.reasoning_content, wanted=lambda run: run.reasons),
    OutputColumn("prompt_token_ids", _INTEGERS, lambda g, r, run: list(r.prompt_ids)),
    OutputColumn(PROMPT_IMAGES, _SPANS, lambda g, r, run: _spans_value(r), wanted=lambda run: run.images),
    OutputColumn("token_ids", _INTEGERS, lambda g, r, run: g.token_ids),
    OutputColumn("finish_reason", _TEXT, lambda g, r, run: g.finish_reason),
    OutputColumn("valid", pa.bool_(), lambda g, r, run: g.valid, wanted=_structured),
    OutputColumn("num_prompt_tokens", _INTEGER, lambda g, r, run: g.num_prompt_tokens),
    OutputColumn("num_cached_tokens", _INTEGER, lambda g, r, run: g.num_cached_tokens),
    OutputColumn("num_output_tokens", _INTEGER, lambda g, r, run: len(g.token_ids)),
    OutputColumn("seed", _INTEGER, lambda g, r, run: r.sampling.seed),
    OutputColumn("num_decode_steps", _INTEGER, lambda g, r, run: g.counts.num_decode_steps),
    OutputColumn("num_spec_steps", _INTEGER, lambda g, r, run: g.counts.num_spec_steps),
    OutputColumn("num_draft_tokens", _INTEGER, lambda g, r, run: g.counts.num_draft_tokens),
    OutputColumn("num_accepted_draft_tokens", _INTEGER, lambda g, r, run: g.counts.num_accepted_draft_tokens),
    OutputColumn("acceptance_histogram", _INTEGERS, lambda g, r, run: g.counts.acceptance_histogram),
    OutputColumn("per_step_accepted", _INTEGERS, lambda g, r, run: g.counts.per_step_accepted),
    OutputColumn("num_forced_tokens", _INTEGER, lambda g, r, run: g.counts.num_forced_tokens, wanted=_structured),
    OutputColumn("mean_acceptance_length", _FLOAT, lambda g, r, run: mean_acceptance_length(g.counts)),
    OutputColumn("draft_acceptance_rate", _FLOAT, lambda g, r, run: draft_acceptance_rate(g.counts)),
    OutputColumn("generation_seconds", _FLOAT, lambda g, r, run: slot_seconds(g)),
    OutputColumn("finished_at", pa.timestamp("ms", "UTC"), lambda g, r, run: datetime.now(UTC)),
    OutputColumn(
        "logprobs",
        _LOGPROBS,
        lambda g, r, run: _logprobs_value(g.logprobs),
        wanted=lambda run: run.sampling.logprobs is not None or run.rows_have_settings,
    ),
    OutputColumn("forced_positions", _INTEGERS, lambda g, r, run: g.forced, wanted=_structured),
    OutputColumn("drafter", _TEXT, lambda g, r, run: run.drafter),
    OutputColumn(
        "drafter_version",
        _INTEGER,
        lambda g, r, run: g.drafter_versions[-1] if g.drafter_versions else None,
        wanted=lambda run: run.learning,
    ),
    OutputColumn("lossless", pa.bool_(), lambda g, r, run: g.lossless, wanted=_lenient),
    OutputColumn("verifier", _TEXT, lambda g, r, run: g.verifier, wanted=_lenient),
    OutputColumn("num_lenient_tokens", _INTEGER, lambda g, r, run: len(g.lenient), wanted=_lenient),
    OutputColumn("lenient_positions", _INTEGERS, lambda g, r, run: g.lenient, wanted=_lenient),
)
"""All columns, in the order of the output; `g` is the generation, `r` its request and `run` the traits of its run."""


_OF_ONE_CALL = {"text", "reasoning_content", "prompt_token_ids", PROMPT_IMAGES, "token_ids", "per_step_accepted"}
_OF_ONE_CALL |= {"logprobs", "forced_positions", "lenient_positions"}
PROGRAM = "program_columns"
"""Column of what a program returned, as JSON text, until its part is written; see `with_program_columns`.

An output whose programs return too many different columns keeps it.
"""
MOST_PROGRAM_COLUMNS = 1000
"""Different columns that a program may return, and that those of an output may return without a text in their place."""
_PROGRAM_COLUMNS = (
    OutputColumn("num_calls", _INTEGER, lambda g, r, run: 1),
    OutputColumn(PROGRAM, _TEXT, lambda g, r, run: "{}"),
)
"""Columns that only rows of programs have; see `program_values`."""


def wanted_columns(run: RunTraits) -> tuple[OutputColumn, ...]:
    found = tuple(column for column in COLUMNS if column.wanted(run))
    if not run.program:
        return found
    return (*(column for column in found if column.name not in _OF_ONE_CALL), *_PROGRAM_COLUMNS)


def with_program_columns(generated: pa.StructArray) -> pa.StructArray:
    """Put the columns that programs returned in the place of their JSON text, typed as those of JSON lines.

    Of more than `MOST_PROGRAM_COLUMNS`, such as counts of words by the word, the text stays.
    """
    place = generated.type.get_field_index(PROGRAM)
    if place < 0:
        return generated
    records = [json.loads(text) for text in generated.field(place).to_pylist()]
    names = dict.fromkeys(chain.from_iterable(records))
    if len(names) > MOST_PROGRAM_COLUMNS:
        return generated
    theirs = pa.table({name: infer_column([record.get(name) for record in records]) for name in names})
    kind = unify(seen_types(theirs, "the output"), json_objects=True)
    columns = {field.name: conform(whole(theirs[field.name]), field.type) for field in kind}
    columns |= zip(generated.type.names, generated.flatten(), strict=True)
    del columns[PROGRAM]
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def with_program_text(generated: pa.Table, names: Collection[str]) -> pa.Table:
    """Undo `with_program_columns` where `PROGRAM` is among the `names` of columns that a job generates itself."""
    if PROGRAM not in names:
        return generated
    return _with_text(generated, [name for name in generated.column_names if name not in names], nulls=True)


def too_many_program_columns(schemas: Iterable[pa.Schema]) -> list[str]:
    """Return the columns that programs returned in some files of an output alone, if they are too many for columns.

    So it is, too, if a file has them as text already.
    """
    files = [set(schema.names) for schema in schemas]
    some = sorted(set.union(*files) - set.intersection(*files))
    return some if len(some) > MOST_PROGRAM_COLUMNS or PROGRAM in some else []


def without_program_columns(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Put JSON text in the column `PROGRAM` in the place of those of the `names` that a table has."""
    theirs = [name for name in table.column_names if name in names and name != PROGRAM]
    return _with_text(table, theirs, nulls=False).drop_columns(theirs)


def _with_text(table: pa.Table, theirs: Sequence[str], *, nulls: bool) -> pa.Table:
    """Put some columns into `PROGRAM`, beside what the table has there already."""
    before = table[PROGRAM].to_pylist() if PROGRAM in table.column_names else ["{}"] * table.num_rows
    rows = python_rows(table.select(theirs)) if theirs else [{}] * table.num_rows
    texts = [
        json.dumps({k: v for k, v in row.items() if nulls or v is not None} | json.loads(text), ensure_ascii=False)
        for row, text in zip(rows, before, strict=True)
    ]
    if PROGRAM in table.column_names:
        table = table.drop_columns([PROGRAM])
    return table.append_column(PROGRAM, pa.array(texts, pa.string()))


def columns_type(columns: Sequence[OutputColumn] = COLUMNS) -> pa.StructType:
    return pa.struct([(column.name, column.type) for column in columns])


def column_values(
    generation: Generation, request: Request, run: RunTraits, columns: Sequence[OutputColumn] = COLUMNS
) -> dict[str, Any]:
    return {column.name: column.value(generation, request, run) for column in columns}

"""Reads outputs of generation jobs: run, status, cost, totals over the rows, single rows, errors."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from pyarrow import fs

from drafter.errors import one_line
from drafter.statistics import DecodeCounts, total
from pipeline.errors import InputError
from pipeline.io.column_types import python_rows, python_values
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder, read_run
from pipeline.output.summary import (
    COUNTS,
    OutputTotals,
    parquet_dataset,
    read_batches,
    read_tables,
    record_columns,
)

Row = dict[str, Any]
_ROWS_AT_ONCE = 1024  # the same where rows become Python objects
_COLUMNS = (
    "request_id",
    *COUNTS,
    "num_prompt_tokens",
    "num_cached_tokens",
    "acceptance_histogram",
    "finish_reason",
    "generation_seconds",
)
_LENIENT = "num_lenient_tokens"  # only outputs of verifiers that are not lossless have this column
TOKENS = "token_ids"  # which outputs of programs have not
_MOST_CATEGORIES = 10_000
_LONGEST_CAUSE = 250  # characters, so that what to do is not cut off


def open_output(uri: str) -> OutputFolder:
    """Open the output of a generation job. Raises `InputError` if it cannot be read, or is something else."""
    output = OutputFolder(locate(uri))
    try:
        exists = output.run_file.type == fs.FileType.File
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    if not exists:
        raise InputError(f"{uri} is not the output of a generation job: it has no {output.run_file.name}")
    return output


def read_run_of(output: OutputFolder) -> dict[str, Any]:
    """Return `run.json`. Raises `InputError` if it is damaged."""
    try:
        return read_run(output.run_file)
    except ValueError as error:
        raise InputError(one_line(error)) from error


def open_rows(output: OutputFolder, *, programs: bool = False) -> pyarrow.dataset.Dataset:
    """Open the files of finished rows, with `programs` also those of a rollout, which have no tokens of their own.

    Raises `InputError` if there are none, they cannot be read, or they lack columns.
    """
    if not output.data.parquets():
        raise InputError(f"output {output.root.path} has no finished rows: run drafter generate first")
    with readable(output):
        found = parquet_dataset(output.data)
    if missing := [name for name in _COLUMNS if name not in found.schema.names]:
        raise InputError(f"{output.data.path} is not of drafter generate: its rows have no {', '.join(missing)}")
    if TOKENS not in found.schema.names and not programs:
        raise InputError(
            f"{output.data.path} is of programs (rollout), whose rows have no {TOKENS}: take another output"
        )
    return found


@contextmanager
def readable(output: OutputFolder) -> Iterator[None]:
    """Raise `InputError` for what reading an output's rows raises where their files are damaged or unreadable."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        why = f"{one_line(error, _LONGEST_CAUSE)}; submit its job again"
        raise InputError(f"output {output.root.path} has rows that cannot be read: {why}") from error


def rows_of(output: OutputFolder, columns: Sequence[str] | None) -> Iterator[Row]:
    """Read an output's finished rows, in the order of its parts; `columns` None reads all.

    Raises `InputError` if there are none, or they cannot be read.
    """
    batches = read_batches(open_rows(output), columns, _ROWS_AT_ONCE)
    while True:
        with readable(output):
            batch = next(batches, None)
        if batch is None:
            return
        yield from python_rows(batch)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first position where two sequences differ, the end of the shorter one included; None if equal."""
    places = enumerate(zip_longest(first, second))
    return next((place for place, (ours, theirs) in places if ours != theirs), None)


@dataclass
class Category:
    """Sums over the rows of one category, without the histogram."""

    rows: int = 0
    counts: DecodeCounts = field(default_factory=DecodeCounts)


@dataclass
class RowSummary(OutputTotals):
    """More totals over the finished rows.

    `drawn` has the names of randomly drawn rows, and the file of each. It depends on names alone, so outputs of the
    same input draw the same rows.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, that were not read because other rows had left their state
    lenient_tokens: int = 0  # accepted ones that the target model would not have chosen
    finish_reasons: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Category] = field(default_factory=lambda: defaultdict(Category))  # by category, if any
    slowest: list[Row] = field(default_factory=list)  # some columns of the slowest rows, slowest first
    drawn: dict[str, str] = field(default_factory=dict)


def read_rows(
    dataset: pyarrow.dataset.Dataset, category: str | None, by_file: bool, slowest: int, drawn: int
) -> RowSummary:
    """Read all finished rows; keep the `slowest` slowest ones, and draw `drawn` at random.

    They are grouped by the column `category`; without one, with `by_file`, by the input file that begins a row's name.
    Raises `InputError` if there is no such column, or it has too many values.
    """
    if category is not None and category not in dataset.schema.names:
        names = ", ".join(dataset.schema.names)
        raise InputError(f"the output has no column {category!r} to group by (it has {names}): set --category")
    result = RowSummary()
    keys: list[tuple[int, str, str]] = []
    some = [*({_LENIENT} & set(dataset.schema.names)), *record_columns(dataset)]
    for table in read_tables(dataset, list(dict.fromkeys([*_COLUMNS, *some, *filter(None, [category]), "__filename"]))):
        ids = table["request_id"].to_pylist()
        _add_counts(result, table)
        if category is not None:
            _add_groups(result, table, python_values(table[category].combine_chunks()))
        elif by_file:
            _add_groups(result, table, [name.rpartition(":")[0] for name in ids])
        result.slowest += _slowest(table, slowest)
        result.slowest = nlargest(slowest, result.slowest, key=lambda row: row["generation_seconds"])
        named = zip((zlib.crc32(name.encode()) for name in ids), ids, table["__filename"].to_pylist(), strict=True)
        keys = nsmallest(drawn, [*keys, *named])
    result.drawn = {name: file for _, name, file in keys}
    return result


def _add_counts(result: RowSummary, table: pa.Table) -> None:
    result.add(table)
    result.prompt_tokens += pc.sum(table["num_prompt_tokens"]).as_py() or 0
    result.cached_tokens += pc.sum(table["num_cached_tokens"]).as_py() or 0
    if _LENIENT in table.column_names:
        result.lenient_tokens += pc.sum(table[_LENIENT]).as_py() or 0
    result.finish_reasons.update(table["finish_reason"].to_pylist())


def _add_groups(result: RowSummary, table: pa.Table, categories: Sequence[Any]) -> None:
    names = ["(none)" if value is None else str(value) for value in categories]
    columns = {"category": pa.array(names, pa.string())} | {name: table[name] for name in COUNTS}
    sums = pa.table(columns).group_by("category").aggregate([*((name, "sum") for name in COUNTS), ([], "count_all")])
    for one in sums.to_pylist():
        name = one["category"]
        if name not in result.groups and len(result.groups) >= _MOST_CATEGORIES:
            raise InputError(f"more than {_MOST_CATEGORIES:,} categories: choose another column as --category")
        group = result.groups[name]
        group.rows += one["count_all"]
        group.counts = total([group.counts, DecodeCounts(**{count: one[f"{count}_sum"] for count in COUNTS})])


def _slowest(table: pa.Table, number: int) -> list[Row]:
    places = pc.top_k_unstable(table["generation_seconds"], min(number, table.num_rows))
    rows: list[Row] = table.drop_columns(["acceptance_histogram"]).take(places).to_pylist()
    return rows


def read_full(output: OutputFolder, rows: RowSummary) -> list[Row]:
    """Return the drawn rows with all their columns, in the order of the draw."""
    if not rows.drawn:
        return []
    files = list(dict.fromkeys(rows.drawn.values()))
    dataset = pyarrow.dataset.dataset(files, filesystem=output.root.filesystem, format="parquet")
    table = dataset.to_table(filter=pc.field("request_id").isin(list(rows.drawn)))
    found = {row["request_id"]: row for row in python_rows(table)}
    return [found[name] for name in rows.drawn]


@dataclass
class ErrorSummary:
    """Number of failed rows by type of error, and some rows of each type."""

    kinds: Counter[str] = field(default_factory=Counter)
    examples: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.kinds.total()


def read_errors(output: OutputFolder, each: int) -> ErrorSummary:
    """Read all errors, and keep up to `each` rows of each type."""
    result = ErrorSummary()
    if not output.errors.parquets():
        return result
    columns = ["request_id", "error_type", "message", "input"]
    for batch in read_batches(parquet_dataset(output.errors), columns):
        kinds = batch["error_type"]
        for kind in kinds.unique().to_pylist():
            of_kind = batch.filter(pc.equal(kinds, kind))
            room = each - result.kinds[kind]
            result.kinds[kind] += of_kind.num_rows
            result.examples += of_kind.slice(0, max(room, 0)).to_pylist()
    result.examples.sort(key=lambda row: str(row["error_type"]))
    return result

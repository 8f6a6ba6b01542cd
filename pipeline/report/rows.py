"""Reads an output's rows: totals, the slowest rows, a random sample, and their decode steps."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from drafter.errors import LoadError, one_line
from drafter.statistics import DecodeCounts
from drafter.text.tokenizers import Detokenizer, load_tokenizer
from pipeline.errors import InputError
from pipeline.io.column_types import python_rows, python_values
from pipeline.io.files import Location
from pipeline.output.folder import OutputFolder


@dataclass(frozen=True)
class Run:
    """Consecutive draft tokens of a step; `lenient` if the target model would have chosen others."""

    text: str
    lenient: bool = False


@dataclass(frozen=True)
class Step:
    """A decode step of a row; `own` is the target model's own token, empty where the row ended before it."""

    number: int
    accepted: int
    runs: tuple[Run, ...]
    own: str

    @property
    def drafted(self) -> str:
        return "".join(run.text for run in self.runs)


def steps_of(
    pieces: Sequence[str], per_step_accepted: Sequence[int], lenient_positions: Collection[int] = ()
) -> list[Step]:
    """Split a row's tokens into decode steps.

    Args:
        per_step_accepted: Accepted draft tokens of each step; the step added one token more.
        lenient_positions: Positions of tokens that the target model would not have chosen.
    """
    lenient = set(lenient_positions)
    steps, start = [], 0
    for number, accepted in enumerate(per_step_accepted, start=1):
        end = min(start + accepted, len(pieces))
        groups = itertools.groupby(range(start, end), lenient.__contains__)
        runs = tuple(Run("".join(pieces[place] for place in places), marked) for marked, places in groups)
        steps.append(Step(number, accepted, runs, "".join(pieces[start + accepted : start + accepted + 1])))
        start += accepted + 1
    return steps


def text_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text, or the ids where `tokenizer` is None.

    A character of several tokens belongs to the last of them. Special tokens show their names.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    special = set(tokenizer.all_special_ids)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in token_ids]
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return [
        str(name) if token in special else piece for token, piece, name in zip(token_ids, pieces, names, strict=True)
    ]


# Rows shown step by step.

_STEPS = "per_step_accepted"


@dataclass(frozen=True)
class Example:
    """A row with all its columns, its prompt as text, and its decode steps."""

    row: Mapping[str, Any]
    prompt: str
    steps: Sequence[Step]


def make_examples(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[list[Example], list[str]]:
    """Return rows with their steps, and sentences on what cannot be shown. The model's tokenizer is not downloaded."""
    tokenizer, missing = None, []
    try:
        tokenizer = load_tokenizer(model, local_files_only=True)
    except LoadError:
        missing.append(f"Tokens are shown as numbers: the tokenizer of {model} is not on this machine")
    if any(_STEPS not in row for row in rows):
        missing.append(f"The steps cannot be shown: the output has no column {_STEPS}")
    examples = []
    for row in rows:
        ids = row["prompt_token_ids"]
        prompt = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        pieces = text_pieces(tokenizer, row["token_ids"])
        steps = steps_of(pieces, row.get(_STEPS, [0] * len(pieces)), row.get("lenient_positions") or ())
        examples.append(Example(row, prompt, steps))
    return examples, missing


# The pass over all rows.

_BATCH_ROWS = 1 << 16
_COUNTS = ("num_output_tokens", "num_decode_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
_COLUMNS = (
    "request_id",
    *_COUNTS,
    "num_prompt_tokens",
    "acceptance_histogram",
    "finish_reason",
    "generation_seconds",
    "finished_at",
)
_LENIENT = "num_lenient_tokens"
"""Only outputs of verifiers that are not lossless have this column."""
_MOST_CATEGORIES = 10_000


@dataclass
class Category:
    """Sums over the rows of one category, without the histogram."""

    rows: int = 0
    counts: DecodeCounts = field(default_factory=DecodeCounts)


@dataclass(frozen=True)
class RowTime:
    """Time and sizes of one row; `seconds` is the time it spent in a slot."""

    seconds: float
    request_id: str
    prompt_tokens: int
    tokens: int
    steps: int
    finish_reason: str


@dataclass
class RowSummary:
    """Totals over the finished rows.

    Args:
        lenient_tokens: Accepted tokens that the target model would not have chosen.
        groups: The rows by category; empty where there are no categories.
        by_second: (rows, tokens) finished in each second of the Unix epoch.
        slowest: Slowest rows, slowest first.
        drawn: Names of randomly drawn rows. Depends on names alone, so outputs of the same input draw the same rows.
        files: File of each drawn row, by name.
    """

    rows: int = 0
    prompt_tokens: int = 0
    lenient_tokens: int = 0
    counts: DecodeCounts = field(default_factory=DecodeCounts)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Category] = field(default_factory=lambda: defaultdict(Category))
    by_second: dict[int, tuple[int, int]] = field(default_factory=dict)
    slowest: list[RowTime] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def open_rows(output: OutputFolder) -> pyarrow.dataset.Dataset:
    """Open the files of finished rows.

    Raises:
        InputError: There are none, they cannot be read, or they lack columns.
    """
    if not any(info.path.endswith(".parquet") for info in output.data.children()):
        raise InputError(f"output {output.root.path} has no finished rows: run jobs.generate first")
    try:
        found = _dataset(output.data)
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(output, error) from error
    if missing := [name for name in _COLUMNS if name not in found.schema.names]:
        raise InputError(f"{output.data.path} is not of jobs.generate: its rows have no {', '.join(missing)}")
    return found


def unreadable(output: OutputFolder, error: Exception) -> InputError:
    """Return the error for files of finished rows that are damaged or unreadable."""
    why = f"{one_line(error)}; submit its job again"
    return InputError(f"output {output.root.path} has rows that cannot be read: {why}")


def read_rows(
    dataset: pyarrow.dataset.Dataset, category: str | None, by_file: bool, slowest: int, drawn: int
) -> RowSummary:
    """Read all finished rows; keep the `slowest` slowest ones, and draw `drawn` at random.

    Args:
        category: Column to group by.
        by_file: Without a `category`, group by the input file that begins a row's name.

    Raises:
        InputError: There is no such column, or it has too many values.
    """
    if category is not None and category not in dataset.schema.names:
        names = ", ".join(dataset.schema.names)
        raise InputError(f"the output has no column {category!r} to group by (it has {names}): set --category")
    result = RowSummary()
    keys: list[tuple[int, str, str]] = []
    leniently = [_LENIENT] if _LENIENT in dataset.schema.names else []
    for table in _batches(dataset, list(dict.fromkeys([*_COLUMNS, *leniently, *filter(None, [category])]))):
        ids = table["request_id"].to_pylist()
        _add_counts(result, table)
        _add_times(result, table)
        if category is not None:
            _add_groups(result, table, table[category].combine_chunks())
        elif by_file:
            _add_groups(result, table, pa.array([name.rpartition(":")[0] for name in ids]))
        result.slowest = nlargest(slowest, [*result.slowest, *_slowest(table, slowest)], key=lambda row: row.seconds)
        named = zip((zlib.crc32(name.encode()) for name in ids), ids, table["_file"].to_pylist(), strict=True)
        keys = nsmallest(drawn, [*keys, *named])
    result.drawn = [name for _, name, _ in keys]
    result.files = {name: file for _, name, file in keys}
    return result


def read_full(output: OutputFolder, rows: RowSummary) -> list[dict[str, Any]]:
    """Return the drawn rows with all their columns, in the order of the draw."""
    if not rows.drawn:
        return []
    files = list(dict.fromkeys(rows.files.values()))
    dataset = pyarrow.dataset.dataset(files, filesystem=output.root.filesystem, format="parquet")
    table = dataset.to_table(filter=pc.field("request_id").isin(rows.drawn))
    found = {row["request_id"]: row for row in python_rows(table)}
    return [found[name] for name in rows.drawn]


@dataclass
class ErrorSummary:
    """Number of failed rows, in all and by type of error, and some rows of each type."""

    rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def read_errors(output: OutputFolder, each: int) -> ErrorSummary:
    """Read all errors, and keep up to `each` rows of each type."""
    result = ErrorSummary()
    if not any(info.path.endswith(".parquet") for info in output.errors.children()):
        return result
    columns = ["request_id", "error_type", "message", "input"]
    for batch in _dataset(output.errors).to_batches(columns=columns, batch_size=_BATCH_ROWS):
        result.rows += batch.num_rows
        kinds = batch["error_type"]
        for kind in kinds.unique().to_pylist():
            of_kind = batch.filter(pc.equal(kinds, kind))
            room = each - result.kinds[kind]
            result.kinds[kind] += of_kind.num_rows
            result.examples += of_kind.slice(0, max(room, 0)).to_pylist()
    result.examples.sort(key=lambda row: str(row["error_type"]))
    return result


def _dataset(folder: Location) -> pyarrow.dataset.Dataset:
    return pyarrow.dataset.dataset(folder.path, filesystem=folder.filesystem, format="parquet")


def _batches(dataset: pyarrow.dataset.Dataset, columns: list[str]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for tagged in dataset.scanner(columns=columns, batch_size=_BATCH_ROWS).scan_batches():
        batch = tagged.record_batch
        file = pa.DictionaryArray.from_arrays(np.zeros(batch.num_rows, dtype=np.int32), [tagged.fragment.path])
        held.append(batch.append_column("_file", file.cast(pa.string())))
        if sum(one.num_rows for one in held) >= _BATCH_ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _add_counts(result: RowSummary, table: pa.Table) -> None:
    result.rows += table.num_rows
    result.prompt_tokens += pc.sum(table["num_prompt_tokens"]).as_py() or 0
    if _LENIENT in table.column_names:
        result.lenient_tokens += pc.sum(table[_LENIENT]).as_py() or 0
    for name in _COUNTS:
        setattr(result.counts, name, getattr(result.counts, name) + (pc.sum(table[name]).as_py() or 0))
    lists = table["acceptance_histogram"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.arange(len(starts)) - starts
    steps = np.bincount(places, weights=pc.list_flatten(lists).to_numpy()).astype(int).tolist()
    histogram = result.counts.acceptance_histogram
    histogram.extend([0] * (len(steps) - len(histogram)))
    for accepted, number in enumerate(steps):
        histogram[accepted] += number
    result.finish_reasons.update(dict(_pairs(pc.value_counts(table["finish_reason"]))))


def _pairs(counts: pa.StructArray) -> Iterable[tuple[str, int]]:
    return ((one["values"], one["counts"]) for one in counts.to_pylist())


def _add_times(result: RowSummary, table: pa.Table) -> None:
    seconds = table["finished_at"].cast(pa.timestamp("s", "UTC"), safe=False).cast(pa.int64())
    sums = pa.table({"second": seconds, "tokens": table["num_output_tokens"]}).group_by("second")
    for one in sums.aggregate([("tokens", "sum"), ("tokens", "count")]).to_pylist():
        rows, tokens = result.by_second.get(one["second"], (0, 0))
        result.by_second[one["second"]] = (rows + one["tokens_count"], tokens + one["tokens_sum"])


def _add_groups(result: RowSummary, table: pa.Table, categories: pa.Array) -> None:
    names = pa.array([None if value is None else str(value) for value in python_values(categories)], pa.string())
    columns = {"category": names} | {name: table[name] for name in _COUNTS}
    sums = pa.table(columns).group_by("category").aggregate([*((name, "sum") for name in _COUNTS), ([], "count_all")])
    for one in sums.to_pylist():
        name = "(none)" if one["category"] is None else one["category"]
        if name not in result.groups and len(result.groups) >= _MOST_CATEGORIES:
            raise InputError(f"more than {_MOST_CATEGORIES:,} categories: choose another column as --category")
        group = result.groups[name]
        group.rows += one["count_all"]
        for count in _COUNTS:
            setattr(group.counts, count, getattr(group.counts, count) + one[f"{count}_sum"])


def _slowest(table: pa.Table, number: int) -> list[RowTime]:
    places = pc.top_k_unstable(table["generation_seconds"], min(number, table.num_rows))
    columns: Sequence[str] = (
        "generation_seconds",
        "request_id",
        "num_prompt_tokens",
        "num_output_tokens",
        "num_decode_steps",
        "finish_reason",
    )
    rows = table.select(columns).take(places).to_pylist()
    return [RowTime(*(row[name] for name in columns)) for row in rows]

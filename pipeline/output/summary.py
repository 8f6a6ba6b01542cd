"""The closing summary of a job, computed from its Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from tqdm import tqdm

from drafter.statistics import (
    PLAIN,
    BatchChoice,
    DecodeCounts,
    MemberView,
    RecordSums,
    StepSums,
    Sums,
    draft_acceptance_rate,
    mean_acceptance_length,
    per_second,
    rejection_warning,
    speculated_share,
    total,
)
from pipeline.io.files import Location
from pipeline.output.folder import OutputFolder

COUNTS = ("num_output_tokens", "num_decode_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
"""Columns of a row's counts; `acceptance_histogram` comes with them."""
RECORDS = ("num_output_tokens", "valid", "num_forced_tokens")
"""Columns of which `records_of` are sums. An output without all of them has no records; a `valid` is its input's."""
_BATCH_ROWS = 1 << 16
_BAR = 40
_LONG = 100.0  # seconds from which tenths are not shown
_ALIKE = 0.995  # relative speed from which a member counts as equally fast


def counts_of(table: pa.Table) -> DecodeCounts:
    """Sum the counts of a table of rows, whose histograms have different lengths."""
    sums: dict[str, Any] = {name: pc.sum(table[name]).as_py() or 0 for name in COUNTS}
    counts = DecodeCounts(**sums)
    lists = table["acceptance_histogram"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.arange(len(starts)) - starts
    weights = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
    counts.acceptance_histogram = np.bincount(places, weights).astype(int).tolist()
    return counts


def record_columns(rows: pyarrow.dataset.Dataset) -> tuple[str, ...]:
    return RECORDS if set(RECORDS) <= set(rows.schema.names) else ()


def records_of(table: pa.Table) -> RecordSums:
    """Sum over those rows of a table that have structured outputs."""
    if not set(RECORDS) <= set(table.column_names):
        return RecordSums()
    found = table.select(RECORDS).filter(pc.is_valid(table["valid"]))
    tokens, valid, forced = (pc.sum(found[name]).as_py() or 0 for name in RECORDS)
    return RecordSums(found.num_rows, valid, tokens, forced)


def is_valid(valid: bool | None, finish_reason: str) -> bool:
    """Return whether a finished row is valid: by its record or its program, or else if its text was not cut."""
    return finish_reason == "stop" if valid is None else valid


@dataclass(frozen=True)
class ValidSums(Sums):
    """Rows, and new tokens, of finished rows that are valid, and of all others."""

    valid: int = 0
    others: int = 0
    valid_tokens: int = 0
    other_tokens: int = 0


@dataclass
class OutputTotals:
    """Sums over an output; `errors` are rows that failed, and all others are of finished rows."""

    rows: int = 0
    errors: int = 0
    counts: DecodeCounts = field(default_factory=DecodeCounts)
    records: RecordSums = field(default_factory=RecordSums)
    valid: ValidSums = field(default_factory=ValidSums)

    def add(self, table: pa.Table) -> None:
        """Add finished rows, with the columns of `COUNTS`, `finish_reason` and `record_columns`."""
        self.rows += table.num_rows
        self.counts = total([self.counts, counts_of(table)])
        self.records = self.records.plus(records_of(table))
        self.valid = self.valid.plus(valid_sums(table))


def read_totals(output: OutputFolder) -> OutputTotals:
    """Sum over all committed parts."""
    found = OutputTotals(errors=count_rows(parquet_dataset(output.errors)))
    if output.data.parquets():
        dataset = parquet_dataset(output.data)
        columns = dict.fromkeys([*COUNTS, "acceptance_histogram", "finish_reason", *record_columns(dataset)])
        for table in read_tables(dataset, list(columns)):
            found.add(table)
    return found


def parquet_dataset(folder: Location) -> pyarrow.dataset.Dataset:
    """Open a folder's Parquet files. Others, such as somebody's notes, are none of a job's."""
    files = [info.path for info in folder.parquets().values()]
    return pyarrow.dataset.dataset(files, filesystem=folder.filesystem, format="parquet")


def read_batches(
    rows: pyarrow.dataset.Dataset, columns: Sequence[str] | None, batch_size: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a dataset in batches, none of which spans two files; `columns` None reads all.

    Arrow would keep each file's footer, which takes 130 kB of memory: gigabytes for tens of thousands of parts.
    """
    names = None if columns is None else list(columns)
    return iter(rows.to_batches(columns=names, batch_size=batch_size, cache_metadata=False))


def read_tables(rows: pyarrow.dataset.Dataset, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of a dataset in tables of about `_BATCH_ROWS`: many outputs have many small files."""
    held, count = list[pa.RecordBatch](), 0
    for batch in read_batches(rows, columns):
        held.append(batch)
        count += batch.num_rows
        if count >= _BATCH_ROWS:
            yield pa.Table.from_batches(held)
            held, count = [], 0
    if held:
        yield pa.Table.from_batches(held)


def count_rows(rows: pyarrow.dataset.Dataset) -> int:
    return sum(batch.num_rows for batch in read_batches(rows, []))  # the dataset's own count keeps footers, too


def valid_sums(table: pa.Table) -> ValidSums:
    """Sum over finished rows with `num_output_tokens`, `finish_reason` and `record_columns`; see `is_valid`."""
    valid = pc.equal(table["finish_reason"], "stop")
    if set(RECORDS) <= set(table.column_names):  # otherwise a column `valid` is the input's
        valid = pc.coalesce(table["valid"], valid)
    tokens, rows = pc.sum(table["num_output_tokens"]).as_py() or 0, pc.sum(valid).as_py() or 0
    inside = pc.sum(table["num_output_tokens"].filter(valid)).as_py() or 0
    return ValidSums(rows, table.num_rows - rows, inside, tokens - inside)


def summarise(
    output: OutputFolder,
    found: OutputTotals,
    new_tokens: int,
    new_rows: int,
    seconds: float,
    sentences: Sequence[str] = (),
) -> str:
    """Return the summary as text; `new_rows` includes errors, and `seconds` are those of generation."""
    counts = found.counts
    lines = [
        f"rows        {found.rows:,} finished, {found.errors:,} failed",
        f"tokens      {counts.num_output_tokens:,} in {counts.num_decode_steps:,} decode steps of a row",
    ]
    if new_rows:
        rates = f"{per_second(new_tokens, seconds):,.0f} tokens/s, {per_second(new_rows, seconds):,.1f} rows/s"
        lines.append(f"speed       {rates} ({new_rows:,} rows in {time_span(seconds)} of generation)")
    lines += acceptance_lines(counts)
    if (records := found.records).records:
        share, forced = f"{records.valid_share:.0%}", f"{records.forced_share:.0%} of their tokens forced"
        lines.append(f"records     {records.valid:,} of {records.records:,} valid ({share}); {forced}")
    lines += [f"{'' if place else 'drafting':<12}{sentence}" for place, sentence in enumerate(sentences)]
    lines.append(f"results     {output.data.path}")
    if found.errors:
        lines.append(f"errors      {output.errors.path}")
    lines += [f"batch       {file.path}" for file in (output.batch_output, output.batch_errors) if file.exists]
    lines.append(f"run         {output.run_file.path}")
    return "\n".join(lines)


def acceptance_lines(counts: DecodeCounts) -> list[str]:
    """Report tokens per step, the share of speculative steps, and the acceptance rate."""
    if not counts.num_draft_tokens:
        return ["speculation none: every step was plain decoding, and gave one token"]
    return [
        f"speculation {mean_acceptance_length(counts):.2f} tokens a step (plain decoding: 1.00); "
        f"{speculated_share(counts):.0%} of the steps speculated; "
        f"{draft_acceptance_rate(counts):.0%} of {counts.num_draft_tokens:,} draft tokens accepted",
        *filter(None, [rejection_warning(counts)]),
        *histogram_lines(counts),
    ]


def histogram_lines(counts: DecodeCounts) -> list[str]:
    """Draw the accepted draft tokens per step as bars."""
    steps = sum(counts.acceptance_histogram)
    if not steps:
        return []
    most = max(counts.acceptance_histogram)
    return ["accepted    share of steps"] + [
        f"{accepted:>8}    {'█' * round(_BAR * number / most) or '▏' * bool(number):<{_BAR}} {number / steps:>6.1%}"
        for accepted, number in enumerate(counts.acceptance_histogram)
    ]


def speculation_record(choices: Sequence[BatchChoice]) -> dict[str, Any] | None:
    """Return the estimated gain over plain decoding and the choices, with reasons; None without a choice."""
    if not choices:
        return None
    return {
        **_figures(_all_steps(choices)),
        "by_rows": [_choice_record(choice) for choice in choices],
        "sentences": speculation_sentences(choices),
    }


def _choice_record(choice: BatchChoice) -> dict[str, Any]:
    verdict = choice.verdict
    return {
        "rows": choice.rows,
        "chosen": choice.chosen,
        "drafts": verdict and verdict.drafts,
        "nodes": verdict and verdict.nodes,
        "token_cost": verdict and round(verdict.cost, 4),
        "token_gain": verdict and round(verdict.gain, 4),
        "explored": choice.explored,
        **_figures(choice.sums),
        "members": [
            {"name": one.name, "beside": one.beside, "relative": round(one.relative, 3)}
            for one in choice.members
            if one.beside is not None
        ],
    }


def speculation_sentences(choices: Sequence[BatchChoice]) -> list[str]:
    """Describe the cost of plain decoding, the choice at each batch size, and unused drafters."""
    found = [] if not choices else _plain_sentence(_all_steps(choices))
    found += [_choice_sentence(choice) for choice in choices]
    return found + _unused_sentence(choices)


def _all_steps(choices: Sequence[BatchChoice]) -> StepSums:
    return reduce(StepSums.plus, (choice.sums for choice in choices))


def _figures(sums: StepSums) -> dict[str, Any]:
    return {
        "estimated_speedup": round(sums.speedup, 4),
        "margin": None if sums.margin is None else round(sums.margin, 4),
        "steps": sums.steps,
        "timed_steps": sums.timed,
        "plain_steps": sums.plain,
        "speculated_share": round(sums.speculated_share, 4),
        "seconds": round(sums.seconds, 3),
        "plain_seconds": round(sums.plain_seconds, 3),
    }


def _plain_sentence(sums: StepSums) -> list[str]:
    if not sums.spec_row_steps:
        return []
    return [
        f"The decode steps were {_times(sums)} as fast as plain decoding: {time_span(sums.seconds)}, where that would "
        f"have taken about {time_span(sums.plain_seconds)} ({_basis(sums)})."
    ]


def _choice_sentence(choice: BatchChoice) -> str:
    sums, verdict, place = choice.sums, choice.verdict, _rows(choice.rows)
    if verdict is None:
        return f"Not decided at {place}: {sums.steps:,} steps are too few to tell whether drafting pays."
    cost, gain = f"{max(verdict.cost, 0.0):.2f} of a step", f"{verdict.gain:.2f} tokens"
    name = _name(choice.chosen)
    if verdict.drafts:
        drafted = f"{name[0].upper()}{name[1:]} drafts" if name else "Drafting"
        # A short job has spent its steps on finding out.
        until = " it has not paid yet, with what finding out took:" if sums.speedup < 1 else ""
        worth = (
            f"{sums.steps:,} steps, of which {_share(sums)} speculated, were {_times(sums)} as fast as plain decoding"
        )
        return f"{drafted} at {place}: a draft token costs {cost} and brings {gain};{until} {worth}."
    whose = f" of {name}" if name else ""
    tried = f"; drafting was tried in {_share(sums)} of {sums.steps:,} steps" if sums.spec_row_steps else ""
    return f"Plain decoding at {place}: a draft token{whose} costs {cost} and would bring {gain}{tried}."


def _unused_sentence(choices: Sequence[BatchChoice]) -> list[str]:
    used = {part for one in choices if one.verdict and one.verdict.drafts for part in one.chosen.split("+")}
    best: dict[str, tuple[MemberView, int]] = {}
    for choice in choices:
        for view in choice.members:
            if view.name in used or "+" in view.name:
                continue
            if view.name not in best or view.relative > best[view.name][0].relative:
                best[view.name] = view, choice.rows
    if not best:
        return []
    return ["Not chosen in the end: " + ", ".join(_unused(view, rows) for view, rows in best.values()) + "."]


def _unused(view: MemberView, rows: int) -> str:
    if view.beside is None:
        return f"{_name(view.name)} ({PLAIN} is faster)"
    other = view.beside if view.beside == PLAIN else _name(view.beside)
    how = f"{view.relative:.2f} times as fast as" if view.relative < _ALIKE else "no faster than"
    return f"{_name(view.name)} ({how} {other} at {_rows(rows)})"


def _name(member: str) -> str:
    return " with ".join("the draft head" if part == "head" else part for part in member.split("+"))


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _share(sums: StepSums) -> str:
    share = sums.speculated_share
    return f"{share:.0%}" if not 0 < share < 0.01 else "less than 1%"


def _times(sums: StepSums) -> str:
    margin = "" if sums.margin is None else f" ± {sums.margin:.2f}"
    return f"{sums.speedup:.2f}{margin} times"


def _basis(sums: StepSums) -> str:
    if not sums.timed:
        return "an estimate from latencies measured at start"
    plain = f"{sums.plain:,} of them plain" if sums.plain else "and from plain steps at start"
    return f"an estimate from {sums.timed:,} steps, {plain}"


def time_span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _LONG else str(tqdm.format_interval(seconds))

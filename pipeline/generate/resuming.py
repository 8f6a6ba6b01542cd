"""Resuming an output: what earlier submissions left, and finished rows that a changed input still requests.

A changed input is staged again under other part names (`StagedInput.revision`). Results of matching rows move to the
new parts: complete parts are committed, other rows are saved as unfinished. Until then the old list of parts is valid.
The new list is one file, so the change is atomic; the next submission deletes results that belong to no listed part.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from drafter.errors import one_line
from pipeline.engines.ledger import SavedRow, read_unfinished, write_unfinished
from pipeline.errors import InputError
from pipeline.generate.checks import Job
from pipeline.generate.row_images import IMAGES
from pipeline.generate.staging import StagingPlan, content_hash, read_rows, refuse_shared_ids, repeats
from pipeline.io.files import Location
from pipeline.io.listing import read_apart
from pipeline.io.parts import STAGED_FORMAT, Part, StagedInput, mend_list, with_problems, with_repeats, with_row_type
from pipeline.output.batch_results import batch_bytes
from pipeline.output.columns import OutputColumn, columns_type, with_program_text
from pipeline.output.folder import OutputFolder, read_run
from pipeline.output.part_files import commit_part, discard_torn, is_whole

_SHOWN = 3  # rows that cannot be generated, of which a dry run says why
_OPEN_FILES = 4
"""Result files in memory: a new part has rows of one or two old parts."""
_PART = r"(?:\d{3,}-)?\d{5}-\d{6}"
_RESULT_FILE = re.compile(rf"{_PART}(?:-to-{_PART})?\.parquet")


def is_finished(job: Job) -> bool:
    """Return whether the output is complete and intact, and the input unchanged since."""
    output = job.output
    if not output.run_file.exists:
        return False
    run = read_run(output.run_file)
    if run["state"] != "finished" or run.get("batch_bytes") != batch_bytes(output):
        return False
    staged = StagedInput.load(output.staged)
    return staged is not None and staged.source == job.source and is_whole(output, staged.parts)


def is_damaged(job: Job, staged: StagedInput) -> bool:
    """Return whether staged rows are damaged that are still needed: to generate, or for an OpenAI batch's answers."""
    needed = staged.parts if job.prompts.kind == "openai" else staged.without(job.output.committed())
    return bool(staged.damaged(needed))


def reopen(job: Job) -> StagedInput | None:
    """Return an earlier submission's staged input after deleting incomplete files; `InputError` if unusable."""
    output = job.output
    output.delete_temporary()
    staged = StagedInput.load(output.staged)
    if staged is None:
        if output.committed():
            raise InputError(
                f"output {job.config.output} has results but no list of their rows (_staged): choose another"
            )
        return None
    mend_list(output.staged)
    delete_strays(output, staged)
    discard_torn(output, staged.parts)
    if staged.format != STAGED_FORMAT and (staged.source != job.source or staged.without(output.committed())):
        if output.has_results():
            raise _older(job)
        return None  # nothing is lost by staging the input again
    if staged.source != job.source and not output.has_results():
        output.forget_job()
        return None
    return staged


def _older(job: Job) -> InputError:
    return InputError(
        f"output {job.config.output} was begun by an earlier release, which staged its input otherwise: "
        "go on with that release, or choose another output"
    )


def delete_strays(output: OutputFolder, staged: StagedInput) -> None:
    """Delete result and staged files that belong to no listed part, left from an old or an abandoned input."""
    parts = {part.name for part in staged.parts}
    plan = output.compaction()
    merged = {} if plan is None else plan.data | plan.errors
    stale = not parts.issuperset(chain.from_iterable(merged.values()))
    for folder in (output.data, output.errors, output.staged):
        for info in folder.children():
            name = info.base_name
            part = name.removesuffix(".parquet")
            if _RESULT_FILE.fullmatch(name) and part not in parts and (stale or part not in merged):
                (folder / name).delete()
    if stale:
        output.forget_compaction()


# A changed input.


@dataclass(frozen=True)
class AskedRow:
    """A row's request.

    Args:
        seed_name: What its seed follows from; None where it has a problem.
        key: A hash of its prompt, its own settings and its sample number.
    """

    name: str
    seed_name: str | None
    key: bytes


@dataclass(frozen=True)
class Changes:
    """Differences between an output's input and the current one; `open` rows are still to be generated."""

    rows: int
    kept: int
    open: int
    changed: int
    removed: int
    broken: tuple[str, ...] = ()  # which rows cannot be generated, and why

    def __str__(self) -> str:
        new = self.rows - self.kept - self.open - self.changed
        counts = {"kept": self.kept, "still to generate": self.open, "changed": self.changed, "new": new}
        counts["removed, whose results go"] = self.removed
        said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        left = len(self.broken) - _SHOWN
        shown = [*self.broken[:_SHOWN], *([f"and {left:,} more"] if left > 0 else [])]
        broken = f"; {len(self.broken):,} of them will be errors: {'; '.join(shown)}" if shown else ""
        return f"{self.rows:,} rows: {said}{broken}"


def asked_rows(rows: pa.Table, *, several: bool) -> Iterator[AskedRow]:
    """Yield the requests of staged rows; with `several`, an input row may be several, named `ID#0`, `ID#1`, …."""
    columns = (rows[name].to_pylist() for name in ("request_id", "seed_name", "asked", "problem"))
    for name, seed_name, asked, problem in zip(*columns, strict=True):
        sample = name.rpartition("#")[2] if several else ""
        text = f"{sample} {json.dumps(problem) if asked is None else asked}"
        yield AskedRow(name, seed_name, content_hash(text))


def match(before: Sequence[AskedRow], now: Sequence[AskedRow], *, drawn: bool) -> list[int | None]:
    """Match each current row to an old one with the same request, at best of the same seed. Each index is used once.

    Where tokens are `drawn`, another seed would give others, so that only a row of the same seed matches.
    """
    found: list[int | None] = [None] * len(now)
    identities: list[Callable[[AskedRow], Hashable]] = [lambda row: (row.seed_name, row.key), lambda row: row.key]
    for identity in identities[:1] if drawn else identities:
        taken, free = set(found), defaultdict[Hashable, deque[int]](deque)
        for index, row in enumerate(before):
            if index not in taken:
                free[identity(row)].append(index)
        for place, row in enumerate(now):
            if found[place] is None and free.get(identity(row)):
                found[place] = free[identity(row)].popleft()
    return found


def compare(
    before: Sequence[AskedRow], now: Sequence[AskedRow], found: Sequence[int | None], done: Collection[str]
) -> Changes:
    """Count changed rows, given the result of `match` and the names of finished rows."""
    same = [index for index in found if index is not None]
    kept = sum(before[index].name in done for index in same)
    left = {row.name for row in before} - {before[index].name for index in same}
    changed = sum(index is None and row.name in left for row, index in zip(now, found, strict=True))
    return Changes(len(now), kept, len(same) - kept, changed, len(before) - len(same) - changed)


class Results:
    """Results of an output, by row name."""

    def __init__(self, output: OutputFolder, staged: StagedInput) -> None:
        self._given = staged.row_type.num_fields
        self.unfinished = read_unfinished(output)
        self._problems: dict[str, dict[str, Any]] = {}
        for info in output.errors.parquets().values():
            file = Location(output.root.filesystem, info.path)
            for row in file.read_parquet(["request_id", "error_type", "message", "attempts"]).to_pylist():
                problem = {"type": row["error_type"], "message": row["message"], "attempts": row["attempts"]}
                self._problems[row["request_id"]] = problem
        self._places: dict[str, tuple[str, int]] = {}
        for info in output.data.parquets().values():
            file = Location(output.root.filesystem, info.path)
            names = file.read_parquet(["request_id"])["request_id"].to_pylist()
            self._places |= {name: (info.path, number) for number, name in enumerate(names)}
        self._left = {row.request_id: row for row in self.unfinished if row.request_id not in self._places}
        self._files = output.root.filesystem
        self._generated = lru_cache(_OPEN_FILES)(self._read_generated)

    @property
    def done(self) -> set[str]:
        left = (name for name, row in self._left.items() if row.generated is not None or row.problem is not None)
        return {*self._places, *self._problems, *left}

    def problem(self, name: str | None) -> dict[str, Any] | None:
        if name is None:
            return None
        found = self._problems.get(name) or (self._left[name].problem if name in self._left else None)
        return None if found is None else {**found, "input": None}

    def generated(self, names: Sequence[str | None], columns: Sequence[OutputColumn]) -> pa.StructArray:
        """Return the generated columns of rows; null where there are none."""
        kind = columns_type(columns)
        numbers: dict[str, list[tuple[int, int]]] = {}
        order: list[int | None] = [None] * len(names)
        left: list[dict[str, Any]] = []
        for position, name in enumerate(names):
            unfinished = self._left.get(name) if name is not None else None
            if name in self._places:
                file, number = self._places[name]
                numbers.setdefault(file, []).append((number, position))
            elif unfinished is not None and unfinished.generated is not None:
                order[position] = len(left)
                left.append(unfinished.generated)
        pieces = [pa.array(left, kind)]
        at = len(left)
        for file, some in numbers.items():
            table = self._generated(file).take(pa.array([number for number, _ in some]))
            pieces.append(_struct(with_program_text(table, kind.names), kind))
            for _, position in some:
                order[position], at = at, at + 1
        return pa.concat_arrays(pieces).take(pa.array(order, pa.int64()))

    def _read_generated(self, path: str) -> pa.Table:
        """Read the generated columns, which follow the name and the input's columns."""
        table = Location(self._files, path).read_parquet()
        return table.select(table.column_names[1 + self._given :])


def _struct(table: pa.Table, kind: pa.StructType) -> pa.StructArray:
    arrays = [
        table[field.name].combine_chunks().cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def staged_rows(staged: StagedInput, *, several: bool) -> list[AskedRow]:
    """Read the requests of all staged rows, without those of damaged parts."""
    damaged = {part.name for part in staged.damaged(staged.parts)}
    columns = ["request_id", "seed_name", "asked", "problem"]
    tables = (
        with_repeats(staged.file(part).read_parquet(columns), part) for part in staged.parts if part.name not in damaged
    )
    return [row for table in tables for row in asked_rows(table, several=several)]


def grow(job: Job, before: StagedInput, now: StagedInput, columns: Sequence[OutputColumn]) -> None:
    """Move the results of an output to its changed input, and print how many are kept.

    Args:
        job: The job, whose lease the caller holds.
        now: The new staged input, whose list is not saved yet.

    Raises:
        InputError: No row's result can be kept.
    """
    output, results = job.output, Results(job.output, before)
    rows_before, rows_now = (staged_rows(one, several=job.several) for one in (before, now))
    found = match(rows_before, rows_now, drawn=job.drawn)
    changes = compare(rows_before, rows_now, found, results.done)
    if not changes.kept and results.done:
        raise InputError(
            f"output {job.config.output} belongs to another input: it has no result for any row of "
            f"{job.config.input}: choose another output"
        )
    print(f"the input has changed: {changes}", file=sys.stderr, flush=True)
    sources = [None if index is None else rows_before[index].name for index in found]
    carried: list[SavedRow] = []
    begin = 0
    for part in now.parts:
        names = sources[begin : begin + part.rows]
        begin += part.rows
        if any(name is not None for name in names):
            carried += _carry(output, now, part, names, results, columns)
    write_unfinished(output, [*results.unfinished, *carried])
    now.save()
    delete_strays(output, now)


def _carry(
    output: OutputFolder,
    staged: StagedInput,
    part: Part,
    names: Sequence[str | None],
    results: Results,
    columns: Sequence[OutputColumn],
) -> list[SavedRow]:
    """Commit a part if all of its rows have results under their old names; otherwise return the rows that have."""
    rows = with_row_type(staged.file(part).read_parquet(["request_id", "row", "problem"]), staged.row_type)
    generated = results.generated(names, columns)
    own = rows["problem"].to_pylist()
    problems = [problem or results.problem(name) for problem, name in zip(own, names, strict=True)]
    done = [problem is not None or one.is_valid for problem, one in zip(problems, generated, strict=True)]
    if all(done):
        rows = with_problems(rows, problems).append_column("generated", generated)
        commit_part(output, part.name, rows)
        return []
    found = zip(rows["request_id"].to_pylist(), generated.to_pylist(), own, problems, strict=True)
    return [
        SavedRow(part.name, name, one, problem, 0)
        for name, one, its_own, problem in found
        if its_own is None and (one is not None or problem is not None)
    ]


def dry_run(job: Job) -> Changes:
    """Compare the input with the output's, and find rows without a valid request, without writing anything.

    Images are not opened.
    """
    rows_per_part = job.config.writing.rows_per_file
    plan = StagingPlan(job.output.staged, job.config.reading, job.prompts, rows_per_part, images=job.staged_images)
    read_apart(job.listing)
    tables = list(read_rows(job.listing, plan))
    now, broken = _asked_of(job, plan, tables), tuple(_refused(job, tables))
    before = StagedInput.load(job.output.staged)
    if before is None:
        return replace(compare([], now, [None] * len(now), ()), broken=broken)
    if before.format != STAGED_FORMAT:
        raise _older(job)
    rows = staged_rows(before, several=job.several)
    matched = match(rows, now, drawn=job.drawn)
    return replace(compare(rows, now, matched, Results(job.output, before).done), broken=broken)


def _refused(job: Job, tables: Sequence[pa.Table]) -> Iterator[str]:
    """Yield the names of rows of which no request can be made, with the reasons."""
    from pipeline.generate.rollout import make_programs  # late: they import torch
    from pipeline.generate.row_requests import make_requests, settings_of

    settings, make = settings_of(job), make_programs if job.prompts.kind == "program" else make_requests
    for table in tables:
        if IMAGES in table.column_names:
            readable, seen = pc.is_null(table["problem"]), pc.is_valid(table[IMAGES])
            table = table.filter(pc.invert(pc.and_(readable, seen)))
        found = make(table.combine_chunks(), settings)
        for name, problem in zip(found["request_id"].to_pylist(), found["problem"].to_pylist(), strict=True):
            if problem is not None:
                yield f"{name}: {one_line(problem['message'])}"


def _asked_of(job: Job, plan: StagingPlan, tables: Sequence[pa.Table]) -> list[AskedRow]:
    asked = [row for table in tables for row in asked_rows(table, several=job.several)]
    if job.prompts.id_column is not None:
        refuse_shared_ids(pa.concat_tables(table.select(["request_id", "place"]) for table in tables), plan)
        return asked
    numbered = zip(asked, repeats(row.seed_name for row in asked), strict=True)
    return [
        replace(row, seed_name=f"{row.seed_name}+{number}") if number and row.seed_name else row
        for row, number in numbered
    ]

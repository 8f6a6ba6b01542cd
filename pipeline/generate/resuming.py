"""Resuming an output: what earlier submissions left, and finished rows that a changed input still requests.

A changed input is staged again under other part names (`StagedInput.revision`). Results of matching rows move to the
new parts: complete parts are committed, other rows are saved as unfinished. Until then the old list of parts is valid.
The new list is one file, so the change is atomic; the next submission deletes results that belong to no listed part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from drafter.errors import one_line
from pipeline.engines.ledger import SavedRow, read_unfinished, write_unfinished
from pipeline.errors import InputError, ProblemType, RowProblem
from pipeline.generate.checks import Job
from pipeline.generate.row_images import IMAGES
from pipeline.generate.row_keys import (
    AskedRows,
    Keys,
    Places,
    asked_rows,
    equal_before,
    joined,
    match,
    numbered_seeds,
    places_of,
    text_keys,
)
from pipeline.generate.staging import StagingPlan, read_rows, refuse_empty, refuse_shared_ids, rows_per_part
from pipeline.io.column_types import conform_struct, whole
from pipeline.io.files import Location, in_parallel
from pipeline.io.listing import read_apart
from pipeline.io.parts import Part, StagedInput, mend_list, with_problems, with_repeats, with_row_type
from pipeline.output.batch_results import batch_bytes
from pipeline.output.columns import OutputColumn, columns_type, with_program_text
from pipeline.output.folder import OutputFolder, read_run
from pipeline.output.part_files import ERROR_SCHEMA, commit_part, discard_torn, is_whole, whole_files

_SHOWN = 3  # rows that cannot be generated, of which a dry run says why
_OPEN_FILES = 4
"""Result files in memory: a new part has rows of one or two old parts."""
_TRY_AGAIN: ProblemType = "ImageUnavailable"
"""Errors of rows that each submission generates again."""
_PART_FILE = re.compile(r"(?:\d{3,}-)?\d{5}-\d{6}\.parquet")


def is_finished(job: Job) -> bool:
    """Return whether the output is complete and intact, and the input unchanged since."""
    output = job.output
    if not output.run_file.exists:
        return False
    run = read_run(output.run_file)
    if run["state"] != "finished" or run.get("batch_bytes") != batch_bytes(output):
        return False
    staged = StagedInput.load(output.staged)
    if staged is None or staged.source != job.source or not is_whole(output, staged.parts):
        return False
    return not _parts_to_try_again(job)


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
    if staged.source != job.source and not output.has_results():
        output.forget_job()
        return None
    _open_again(job, staged)
    return staged


def _parts_to_try_again(job: Job) -> list[str]:
    """Return the names of parts with errors of rows whose images may be there by now."""
    if job.staged_images is None:
        return []
    errors = job.output.errors
    names = sorted(errors.parquets())
    kinds = in_parallel(lambda name: (errors / f"{name}.parquet").read_parquet(["error_type"])["error_type"], names)
    return [name for name, some in zip(names, kinds, strict=True) if _TRY_AGAIN in some.to_pylist()]


def _open_again(job: Job, staged: StagedInput) -> None:
    """Take back the commit of parts with rows to try again; their other rows are saved as unfinished, first of all."""
    output, names = job.output, _parts_to_try_again(job)
    if not names:
        return
    begun = output.committed().intersection(names)  # of others, a driver that was killed here has saved the rows
    rows = [row for row in read_unfinished(output) if row.part not in begun]
    for name in sorted(begun):
        rows += _saved_rows(output, name, staged.row_type.num_fields)
    write_unfinished(output, rows)
    for name in names:
        for folder, file in ((output.data, f"{name}.parquet"), (output.errors, f"{name}.parquet"), (output.told, name)):
            (folder / file).delete()


def _saved_rows(output: OutputFolder, part: str, given: int) -> list[SavedRow]:
    """Return the rows of a part that engines have finished; those that no engine had get their errors again."""
    table = (output.data / f"{part}.parquet").read_parquet()
    made = zip(table["request_id"].to_pylist(), _generated(table, given).to_pylist(), strict=True)
    done = [SavedRow(part, name, one, None, 0) for name, one in made]
    for error in (output.errors / f"{part}.parquet").read_parquet().to_pylist():
        if error["attempts"]:
            problem = RowProblem(error["error_type"], error["message"], attempts=error["attempts"])
            done.append(SavedRow(part, error["request_id"], None, vars(problem), 0))
    return done


def delete_strays(output: OutputFolder, staged: StagedInput) -> None:
    """Delete result and staged files that belong to no listed part, left from an old or an abandoned input."""
    parts = {part.name for part in staged.parts}
    for folder in (output.data, output.errors, output.staged):
        for info in folder.children():
            name = info.base_name
            if _PART_FILE.fullmatch(name) and name.removesuffix(".parquet") not in parts:
                (folder / name).delete()


# A changed input.


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


def compare(before: AskedRows, now: AskedRows, found: Places, done: npt.NDArray[np.bool_]) -> Changes:
    """Count changed rows, given the result of `match` and which old rows are finished."""
    same = found[found >= 0]
    kept = int(done[same].sum())
    changed = int((places_of(now.names[found < 0], np.delete(before.names, same, axis=0)) >= 0).sum())
    return Changes(len(now), kept, len(same) - kept, changed, len(before) - len(same) - changed)


class Results:
    """Results of an output, by the index of their row among `names`, the keys of the staged rows' names.

    Parts that are not whole have none: a submission makes them again.
    """

    def __init__(self, output: OutputFolder, staged: StagedInput, names: Keys) -> None:
        self._given = staged.row_type.num_fields
        self.unfinished = read_unfinished(output)
        self._files = output.root.filesystem
        self._generated = lru_cache(_OPEN_FILES)(self._read_generated)
        files = whole_files(output, staged.parts)
        errors = [file.place.read_parquet(ERROR_SCHEMA.names) for file in files if not file.commits]
        failed = pa.concat_tables([ERROR_SCHEMA.empty_table(), *errors])
        failed = failed.filter(pc.not_equal(failed["error_type"], _TRY_AGAIN))
        self._problems = failed.select(["error_type", "message", "attempts"])
        self._problem_of = places_of(names, text_keys(failed["request_id"].to_pylist()))
        self._paths = [file.place.path for file in files if file.commits]
        there = in_parallel(self._names, self._paths)
        self._begins = np.cumsum([0, *map(len, there)])
        self._result_of = places_of(names, np.concatenate([np.empty((0, 2), np.uint64), *there]))
        self._left_of = places_of(names, text_keys(row.request_id for row in self.unfinished))
        self._left_of[self._result_of >= 0] = -1
        self._ended = np.array([row.generated is not None or row.problem is not None for row in self.unfinished], bool)

    def _names(self, path: str) -> Keys:
        return text_keys(Location(self._files, path).read_parquet(["request_id"])["request_id"].to_pylist())

    @property
    def any(self) -> bool:
        return bool(self._begins[-1] or self._problems.num_rows or self._ended.any())

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """Which rows are finished, [N]."""
        left: npt.NDArray[np.bool_] = np.append(self._ended, False)[self._left_of]
        return left | (self._result_of >= 0) | (self._problem_of >= 0)

    def problem(self, index: int) -> dict[str, Any] | None:
        """Return the problem of a row; None for -1."""
        if index < 0:
            return None
        if (place := int(self._problem_of[index])) >= 0:
            kind, message, attempts = (column[place].as_py() for column in self._problems.columns)
            return {"type": kind, "message": message, "attempts": attempts, "input": None}
        left = int(self._left_of[index])
        found = self.unfinished[left].problem if left >= 0 else None
        return None if found is None else {**found, "input": None}

    def generated(self, indices: Places, columns: Sequence[OutputColumn]) -> pa.StructArray:
        """Return the generated columns of rows; null where there are none, and for -1."""
        kind = columns_type(columns)
        numbers: dict[str, list[tuple[int, int]]] = {}
        order: list[int | None] = [None] * len(indices)
        left: list[dict[str, Any]] = []
        for position, index in enumerate(indices.tolist()):
            place, unfinished = (self._result_of[index], self._left_of[index]) if index >= 0 else (-1, -1)
            if place >= 0:
                file = int(np.searchsorted(self._begins, place, side="right")) - 1
                numbers.setdefault(self._paths[file], []).append((int(place - self._begins[file]), position))
            elif unfinished >= 0 and (generated := self.unfinished[unfinished].generated) is not None:
                order[position] = len(left)
                left.append(generated)
        pieces = [pa.array(left, kind)]
        at = len(left)
        for path, some in numbers.items():
            table = self._generated(path).take(pa.array([number for number, _ in some]))
            pieces.append(conform_struct(whole(with_program_text(table, kind.names).to_struct_array()), kind))
            for _, position in some:
                order[position], at = at, at + 1
        return pa.concat_arrays(pieces).take(pa.array(order, pa.int64()))

    def _read_generated(self, path: str) -> pa.Table:
        return _generated(Location(self._files, path).read_parquet(), self._given)


def _generated(table: pa.Table, given: int) -> pa.Table:
    """Return the generated columns, which follow the name and the `given` ones of the input."""
    return table.select(table.column_names[1 + given :])


def staged_rows(staged: StagedInput, *, several: bool) -> AskedRows:
    """Read the requests of all staged rows, without those of damaged parts."""
    damaged = {part.name for part in staged.damaged(staged.parts)}
    columns = ["request_id", "seed_name", "asked", "problem"]

    def read(part: Part) -> AskedRows:
        return asked_rows(staged.file(part).read_parquet(columns), part.repeats, several=several)

    return joined(in_parallel(read, [part for part in staged.parts if part.name not in damaged]))


def grow(job: Job, before: StagedInput, now: StagedInput, columns: Sequence[OutputColumn]) -> None:
    """Move the results of an output to its changed input, and print how many are kept.

    Args:
        job: The job, whose lease the caller holds.
        now: The new staged input, whose list is not saved yet.

    Raises:
        InputError: No row's result can be kept.
    """
    output = job.output
    rows_before, rows_now = (staged_rows(one, several=job.several) for one in (before, now))
    results = Results(output, before, rows_before.names)
    found = match(rows_before, rows_now, drawn=job.draws(now.row_type.names))
    changes = compare(rows_before, rows_now, found, results.done)
    if not changes.kept and results.any:
        raise InputError(
            f"output {job.config.output} belongs to another input: it has no result for any row of "
            f"{job.config.input}: choose another output"
        )
    print(f"the input has changed: {changes}", file=sys.stderr, flush=True)
    carried: list[SavedRow] = []
    begin = 0
    for part in now.parts:
        indices = found[begin : begin + part.rows]
        begin += part.rows
        if (indices >= 0).any():
            carried += _carry(output, now, part, indices, results, columns)
    write_unfinished(output, [*results.unfinished, *carried])
    now.save()
    delete_strays(output, now)


def _carry(
    output: OutputFolder,
    staged: StagedInput,
    part: Part,
    indices: Places,
    results: Results,
    columns: Sequence[OutputColumn],
) -> list[SavedRow]:
    """Commit a part if all of its rows have results, by their old indices; otherwise return the rows that have."""
    rows = with_row_type(staged.file(part).read_parquet(["request_id", "row", "problem"]), staged.row_type)
    generated = results.generated(indices, columns)
    own = rows["problem"].to_pylist()
    problems = [problem or results.problem(index) for problem, index in zip(own, indices.tolist(), strict=True)]
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

    Images are not opened. Raises `InputError` as staging does.
    """
    rows = job.config.writing.rows_per_file or rows_per_part(job.listing, job.config.reading)
    plan = StagingPlan(job.output.staged, job.config.reading, job.prompts, rows, images=job.staged_images)
    read_apart(job.listing)
    pieces: list[AskedRows] = []
    broken: list[str] = []
    columns: set[str] = set()
    for table in read_rows(job.listing, plan):
        columns.update(table["row"].type.names)
        pieces.append(asked_rows(table, several=job.several))
        broken += _refused(job, table)
    now = joined(pieces)
    refuse_empty(len(now))
    if job.prompts.id_column is not None:
        refuse_shared_ids(now.names, lambda: read_rows(job.listing, plan), plan)
    else:
        now = replace(now, seeds=numbered_seeds(now.seeds, equal_before(now.seeds)))
    before = StagedInput.load(job.output.staged)
    if before is None:
        none = joined([])
        return replace(compare(none, now, np.full(len(now), -1), np.empty(0, bool)), broken=tuple(broken))
    old = staged_rows(before, several=job.several)
    matched = match(old, now, drawn=job.draws(columns))
    done = Results(job.output, before, old.names).done
    return replace(compare(old, now, matched, done), broken=tuple(broken))


def problems_of(job: Job, rows: pa.Table) -> list[dict[str, Any] | None]:
    """Return what is wrong with each of some staged rows, of which no request can be made; an engine never sees it."""
    from pipeline.generate.rollout import make_programs  # late: they import torch
    from pipeline.generate.row_requests import make_requests, settings_of

    make = make_programs if job.prompts.kind == "program" else make_requests
    problems: list[dict[str, Any] | None] = make(rows, settings_of(job))["problem"].to_pylist()
    return problems


def _refused(job: Job, table: pa.Table) -> Iterator[str]:
    """Yield the names of rows of which no request can be made, with the reasons."""
    if IMAGES in table.column_names:
        readable, seen = pc.is_null(table["problem"]), pc.is_valid(table[IMAGES])
        table = table.filter(pc.invert(pc.and_(readable, seen)))
    table = table.combine_chunks()
    for name, problem in zip(table["request_id"].to_pylist(), problems_of(job, table), strict=True):
        if problem is not None:
            yield f"{name}: {one_line(problem['message'])}"


# The end of a job that stops at so many valid rows: those that are finished become all of its rows.


def keep_finished(
    job: Job, staged: StagedInput, rows: Sequence[SavedRow], columns: Sequence[OutputColumn]
) -> StagedInput:
    """Commit the finished `rows` of open parts, and return the input without rows that have not ended.

    Rows are saved first, so that a kill on the way loses none. An engine that still writes a part whose rows have all
    ended writes the same.

    Args:
        job: The job, whose lease the caller holds, and whose engines get no more rows.
    """
    output, committed = job.output, job.output.committed()
    write_unfinished(output, list(rows))
    ended: dict[str, dict[str, SavedRow]] = {}
    for row in rows:
        if row.generated is not None or row.problem is not None:
            ended.setdefault(row.part, {})[row.request_id] = row
    parts = [
        part if part.name in committed else _keep(job, staged, part, ended[part.name], columns)
        for part in staged.parts
        if part.name in committed or part.name in ended
    ]
    kept = replace(staged, parts=tuple(parts))
    kept.save()
    delete_strays(output, kept)
    return kept


def _keep(
    job: Job, staged: StagedInput, part: Part, ended: Mapping[str, SavedRow], columns: Sequence[OutputColumn]
) -> Part:
    file = staged.file(part)
    every = file.read_parquet()
    names = every["request_id"].to_pylist()
    problems = problems_of(job, with_row_type(with_repeats(every, part), staged.row_type))
    whole = all(problem is not None or name in ended for name, problem in zip(names, problems, strict=True))
    kept = [name in ended or (whole and problem is not None) for name, problem in zip(names, problems, strict=True)]
    rows = with_row_type(every, staged.row_type).select(["request_id", "row", "problem"])
    problems = [ended[name].problem if name in ended else own for name, own in zip(names, problems, strict=True)]
    generated = [ended[name].generated if name in ended else None for name in names]
    rows = with_problems(rows, problems).append_column("generated", pa.array(generated, columns_type(columns)))
    commit_part(job.output, part.name, rows.filter(pa.array(kept)))
    if all(kept):
        return part
    file.write_parquet(every.filter(pa.array(kept)))
    repeats = tuple(number for number, keep in zip(part.repeats, kept, strict=True) if keep) if part.repeats else ()
    return replace(part, rows=sum(kept), repeats=repeats)

"""The end of a job that stops at so many valid rows: those that are finished become all of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from pipeline.engines.ledger import SavedRow, write_unfinished
from pipeline.generate.checks import Job
from pipeline.generate.resuming import delete_strays, problems_of
from pipeline.io.parts import Part, StagedInput, with_problems, with_repeats, with_row_type
from pipeline.output.columns import OutputColumn, columns_type
from pipeline.output.part_files import commit_part


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

"""The report job's entry: read an output, write one page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from drafter.base.loading import load_tokenizer
from drafter.errors import LoadError, one_line
from pipeline.command_line import run_job
from pipeline.engines.named_models import model_name
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.output.output_folder import OutputFolder
from pipeline.output.run_file import read_run
from pipeline.report.cost import Cost, cost_of
from pipeline.report.html_page import Comparison, Example, Report, render
from pipeline.report.row_scan import Rows, open_rows, read_errors, read_full, read_rows
from pipeline.report.row_steps import steps_of, text_pieces

PAGE = "report.html"
_DESCRIPTION = """\
Show what a generation job has done as one HTML page: totals, speed, acceptance, cost, slow and failed
rows, and some rows step by step. The job may still be running, and may be on the way to S3 or the like.

  python -m jobs.report results
  python -m jobs.report results --against plain-results --page /tmp/report.html"""
_CATEGORY = "category"
_SLOWEST = 10
_ERRORS_EACH = 5
_COMPARED = 100
_STEPS = "per_step_accepted"


@dataclass(frozen=True)
class ReportConfig:
    """A report.

    Args:
        output: Of a generation job.
        page: The file to write.
        against: Another output, of plain decoding.
        category: Column to group rows by.
        examples: Rows to show step by step.
    """

    output: str
    page: str
    against: str | None
    category: str | None
    examples: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(lambda given: report(parse_config(given)), arguments)


def parse_config(arguments: Sequence[str] | None = None) -> ReportConfig:
    """The report that a command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.report", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", help="folder or URI of a generation job's results")
    parser.add_argument("--page", help=f"file or URI to write; by default {PAGE} in the output")
    parser.add_argument("--against", help="output of the same job with --drafter none, to compare with")
    parser.add_argument(
        "--category", help=f"input column to group rows by; by default {_CATEGORY!r}, or else the rows' source files"
    )
    parser.add_argument("--examples", type=int, default=8, help="rows to show step by step (8)")
    given = parser.parse_args(arguments)
    if given.examples < 0:
        raise InputError(f"--examples must be at least 0, not {given.examples}")
    page = given.page if given.page is not None else f"{given.output.rstrip('/')}/{PAGE}"
    return ReportConfig(given.output, page, given.against, given.category, given.examples)


def report(config: ReportConfig) -> None:
    """Read the output and write the page.

    Raises:
        InputError: One of the outputs or the page cannot be used.
    """
    output = _open(config.output)
    run = read_run(output.run_file)
    rows, category = _rows(config, output, run)
    errors = read_errors(output, _ERRORS_EACH)
    status = _status(output.status_file)
    full = read_full(output, rows)
    against = _compare(config, run, rows, full) if config.against is not None else None
    examples, missing = _examples(full[: config.examples], run["config"])
    found = Report(
        name=config.output,
        run=run,
        status=status,
        rows=rows,
        errors=errors,
        cost=_cost(status, rows, errors.rows),
        against=against,
        category=category,
        examples=examples,
        not_shown=missing,
    )
    page = locate(config.page)
    try:
        page.write_text(render(found))
    except OSError as error:
        raise InputError(f"page {config.page} cannot be written: {one_line(error)}") from error
    print(page.path, file=sys.stdout, flush=True)


def _open(uri: str) -> OutputFolder:
    output = OutputFolder(locate(uri))
    try:
        exists = output.run_file.type == fs.FileType.File
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    if not exists:
        raise InputError(f"{uri} is not the output of a generation job: it has no {output.run_file.name}")
    return output


def _rows(config: ReportConfig, output: OutputFolder, run: Mapping[str, Any]) -> tuple[Rows, str]:
    """What the rows say, and by what they are grouped."""
    dataset = open_rows(output)
    column = config.category or (_CATEGORY if _CATEGORY in dataset.schema.names else None)
    # Rows that have names of their own do not tell their file.
    by_file = column is None and run["config"]["reading"]["id_column"] is None
    drawn = max(config.examples, _COMPARED if config.against is not None else 0)
    rows = read_rows(dataset, column, by_file, _SLOWEST, drawn)
    return rows, column or "source file"


def _status(place: Location) -> dict[str, Any]:
    """`status.json`; empty where there is none."""
    if place.type != fs.FileType.File:
        return {}
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def _cost(status: Mapping[str, Any], rows: Rows, errors: int) -> Cost | str:
    return cost_of(status.get("submissions", ()), rows.rows + errors, rows.counts.num_output_tokens)


def _compare(config: ReportConfig, run: Mapping[str, Any], rows: Rows, full: Sequence[Mapping[str, Any]]) -> Comparison:
    """The output to compare with; the rows drawn from it are the same, where it has the same rows."""
    assert config.against is not None
    output = _open(config.against)
    other = read_run(output.run_file)
    theirs = read_rows(open_rows(output), None, False, 0, _COMPARED)
    tokens = {row["request_id"]: row["token_ids"] for row in read_full(output, theirs)}
    both = [row for row in full if row["request_id"] in tokens]
    status = _status(output.status_file)
    return Comparison(
        name=config.against,
        run=other,
        rows=theirs,
        cost=_cost(status, theirs, read_errors(output, 0).rows),
        same_tokens=sum(row["token_ids"] == tokens[row["request_id"]] for row in both),
        compared=len(both),
        differences=list(_differences(run, rows, other, theirs)),
    )


def _differences(run: Mapping[str, Any], rows: Rows, other: Mapping[str, Any], theirs: Rows) -> list[str]:
    """What makes two costs differ besides drafting."""
    found = []
    if theirs.counts.num_spec_steps:
        found.append(f"that is not plain decoding, it was drafted by {other['config']['drafter']}")
    if rows.rows != theirs.rows:
        found.append(f"the rows, {rows.rows:,} and {theirs.rows:,}")
    for name in ("model", "dtype", "sampling", "input", "reading"):
        if run["meaning"].get(name) != other["meaning"].get(name):
            found.append(f"the {name}")
    return found


def _examples(full: Sequence[Mapping[str, Any]], run_config: Mapping[str, Any]) -> tuple[list[Example], list[str]]:
    """Rows with their steps, and what cannot be shown of them."""
    model = model_name(run_config["model"])
    tokenizer, missing = None, []
    try:
        tokenizer = load_tokenizer(model, local_files_only=True)
    except LoadError:
        missing.append(f"Tokens are shown as numbers: the tokenizer of {model} is not on this machine")
    if any(_STEPS not in row for row in full):
        missing.append(f"The steps cannot be shown: the output has no column {_STEPS}")
    examples = []
    for row in full:
        ids = row["prompt_token_ids"]
        prompt = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        pieces = text_pieces(tokenizer, row["token_ids"])
        examples.append(Example(row, prompt, steps_of(pieces, row.get(_STEPS, [0] * len(pieces)))))
    return examples, missing

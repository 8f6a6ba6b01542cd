"""The report job's entry: reads an output, and writes one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.errors import one_line
from pipeline.command_line import run_job
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder
from pipeline.report.charts import read_learning
from pipeline.report.html_page import Report, render
from pipeline.report.output_files import COMPARED_ROWS, compare, open_output, output_cost, read_run_of, read_status
from pipeline.report.rows import RowSummary, make_examples, open_rows, read_errors, read_full, read_rows

PAGE = "report.html"
_DESCRIPTION = """\
Show what a generation job has done as one HTML page: totals, speed, acceptance, cost, slow and failed
rows, and some rows step by step. The job may still be running, and its output may be on S3 or the like.

  python -m jobs.report results
  python -m jobs.report results --against plain-results --page /tmp/report.html"""
_CATEGORY = "category"
_SLOWEST = 10
_ERRORS_EACH = 5


@dataclass(frozen=True)
class ReportConfig:
    """A report.

    Args:
        output: Folder or URI of a generation job's results.
        page: File or URI to write.
        against: Another output to compare with, of plain decoding; None for no comparison.
        category: Column to group rows by; None for the default.
        examples: How many rows to show step by step.
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
    """Return the report that a command line asks for."""
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
    output = open_output(config.output)
    run = read_run_of(output)
    rows, category = _rows(config, output, run)
    errors = read_errors(output, _ERRORS_EACH)
    status = read_status(output)
    drawn = read_full(output, rows)
    against = compare(config.against, run, rows, drawn) if config.against is not None else None
    examples, missing = make_examples(drawn[: config.examples], model_name(run["config"]["model"]))
    found = Report(
        name=config.output,
        run=run,
        status=status,
        rows=rows,
        errors=errors,
        cost=output_cost(status, rows, errors.rows),
        against=against,
        category=category,
        examples=examples,
        not_shown=missing,
        learning=read_learning(output, run),
    )
    page = locate(config.page)
    try:
        page.write_text(render(found))
    except OSError as error:
        raise InputError(f"page {config.page} cannot be written: {one_line(error)}") from error
    print(page.path, file=sys.stdout, flush=True)


def _rows(config: ReportConfig, output: OutputFolder, run: Mapping[str, Any]) -> tuple[RowSummary, str]:
    """Return what the rows say, and what they are grouped by."""
    dataset = open_rows(output)
    column = config.category or (_CATEGORY if _CATEGORY in dataset.schema.names else None)
    # A row's name begins with its file only where no column names the rows.
    by_file = column is None and run["config"]["reading"]["id_column"] is None
    drawn = max(config.examples, COMPARED_ROWS if config.against is not None else 0)
    rows = read_rows(dataset, column, by_file, _SLOWEST, drawn)
    return rows, column or "source file"

"""Entry of the report job: reads an output and writes one page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from drafter.errors import one_line
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder
from pipeline.report.charts import read_learning
from pipeline.report.config import CATEGORY, ReportConfig
from pipeline.report.html_page import Report, render
from pipeline.report.output_files import COMPARED_ROWS, compare, open_output, output_cost, read_run_of, read_status
from pipeline.report.rows import RowSummary, make_examples, open_rows, read_errors, read_full, read_rows

_SLOWEST = 10
_ERRORS_EACH = 5


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
    dataset = open_rows(output)
    column = config.category or (CATEGORY if CATEGORY in dataset.schema.names else None)
    # A row's name begins with its file only where no column names the rows.
    by_file = column is None and run["config"]["reading"]["id_column"] is None
    drawn = max(config.examples, COMPARED_ROWS if config.against is not None else 0)
    rows = read_rows(dataset, column, by_file, _SLOWEST, drawn)
    return rows, column or "source file"

"""Configuration and command line of the report job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.command_line import new_parser, parse_arguments
from pipeline.errors import InputError

PAGE = "report.html"
_DESCRIPTION = """\
Show what a generation job has done as one HTML page: totals, speed, acceptance, cost, slow and failed
rows, and some rows step by step. The job may still be running, and its output may be on S3 or the like.

  python -m jobs.report results
  python -m jobs.report results --against plain-results --page /tmp/report.html"""
CATEGORY = "category"
"""Default column to group rows by."""


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


def parse_config(arguments: Sequence[str] | None = None) -> ReportConfig:
    """Return the report that a command line asks for."""
    parser = new_parser("jobs.report", "output [settings]", _DESCRIPTION)
    parser.add_argument("output", help="folder or URI of a generation job's results")
    parser.add_argument("--page", help=f"file or URI to write; by default {PAGE} in the output")
    parser.add_argument("--against", help="output of the same job with --drafter none, to compare with")
    parser.add_argument(
        "--category", help=f"input column to group rows by; by default {CATEGORY!r}, or else the rows' source files"
    )
    parser.add_argument("--examples", type=int, default=8, help="rows to show step by step")
    given = parse_arguments(parser, arguments)
    if given.examples < 0:
        raise InputError(f"--examples must be at least 0, not {given.examples}")
    page = given.page if given.page is not None else f"{given.output.rstrip('/')}/{PAGE}"
    return ReportConfig(given.output, page, given.against, given.category, given.examples)

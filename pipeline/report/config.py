"""Configurations and command lines of the report and comparison jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.command_line import new_parser, parse_arguments
from pipeline.errors import InputError
from pipeline.io.files import address_below

REPORT_PAGE, COMPARISON_PAGE = "report.html", "comparison.html"
CATEGORY = "category"  # default column to group rows by
_REPORT = """\
Show what a generation job has done as one HTML page: totals, speed, acceptance, cost, slow and failed
rows, and some rows step by step. The job may still be running, and its output may be on S3 or the like.

  drafter report results
  drafter report results --against plain-results --page /tmp/report.html"""
_COMPARISON = """\
Compare two outputs of generation jobs, of the same prompts: how many rows have the same tokens, where the
others differ, and, with a scorer, whether one is worth more than the other.

  drafter compare exact lenient --scorer number --target answer
  drafter compare exact lenient --scorer score.py:is_right --page /tmp/comparison.html"""


@dataclass(frozen=True)
class ReportConfig:
    output: str
    page: str | None
    against: str | None
    category: str | None
    examples: int

    def __post_init__(self) -> None:
        _check_examples(self.examples)

    @property
    def page_uri(self) -> str:
        return self.page or address_below(self.output, REPORT_PAGE)


def parse_report(arguments: Sequence[str] | None = None) -> ReportConfig:
    parser = new_parser("report", "output [settings]", _REPORT)
    parser.add_argument("output", help="folder or URI of a generation job's results")
    parser.add_argument("--page", help=f"file or URI to write; by default {REPORT_PAGE} in the output")
    parser.add_argument("--against", help="output of the same job with --drafter none, to compare with")
    parser.add_argument(
        "--category", help=f"input column to group rows by; by default {CATEGORY!r}, or else the rows' source files"
    )
    parser.add_argument("--examples", type=int, default=8, help="rows to show step by step")
    given = parse_arguments(parser, arguments)
    return ReportConfig(given.output, given.page, given.against, given.category, given.examples)


@dataclass(frozen=True)
class CompareConfig:
    first: str
    second: str
    scorer: str | None = None
    target: str | None = None
    page: str | None = None
    examples: int = 20

    def __post_init__(self) -> None:
        _check_examples(self.examples)

    @property
    def page_uri(self) -> str:
        return self.page or address_below(self.second, COMPARISON_PAGE)


def parse_comparison(arguments: Sequence[str] | None = None) -> CompareConfig:
    parser = new_parser("compare", "first second [settings]", _COMPARISON)
    parser.add_argument("first", help="folder or URI of a generation job's results")
    parser.add_argument("second", help="the same of another job on the same prompts")
    parser.add_argument("--scorer", help="number, string, json, or FILE.py:function: what a row is worth")
    parser.add_argument("--target", help="column with the right answer, for number, string and json")
    parser.add_argument("--page", help=f"file or URI to write; by default {COMPARISON_PAGE} in the second output")
    parser.add_argument("--examples", type=int, default=20, help="differing rows to show")
    given = parse_arguments(parser, arguments)
    return CompareConfig(given.first, given.second, given.scorer, given.target, given.page, given.examples)


def _check_examples(examples: int) -> None:
    if examples < 0:
        raise InputError(f"--examples must be at least 0, not {examples}")

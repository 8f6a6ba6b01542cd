"""`drafter report` or `python -m jobs.report`: show what a generation job has done as one page."""

import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from pipeline.report.config import parse_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_report(arguments)
    from pipeline.report.page import report  # takes seconds: a mistake is told before

    report(config)


if __name__ == "__main__":
    sys.exit(main())

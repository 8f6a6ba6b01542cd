"""`drafter compare` or `python -m jobs.compare`: compare two outputs of the same prompts side by side."""

import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from pipeline.report.config import parse_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> int:
    config = parse_comparison(arguments)
    from pipeline.report.compare import compare_or_audit  # takes seconds: a mistake is told before

    return compare_or_audit(config)


if __name__ == "__main__":
    sys.exit(main())

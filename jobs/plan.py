"""`drafter plan` or `python -m jobs.plan`: find the best stack of drafters."""

import sys
from collections.abc import Sequence

from pipeline.command_line import command_of, run_job
from pipeline.evaluation.config import parse_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_plan(arguments)
    from pipeline.evaluation.plan_job import plan  # takes seconds: a mistake is told before

    plan(config, command_of("jobs.plan", arguments))


if __name__ == "__main__":
    sys.exit(main())

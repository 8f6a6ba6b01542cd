"""`drafter evaluate` or `python -m jobs.evaluate`: measure what drafters gain."""

import sys
from collections.abc import Sequence

from pipeline.command_line import command_of, run_job
from pipeline.evaluation.config import parse_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_config(arguments)
    from pipeline.evaluation.evaluate_job import evaluate  # takes seconds: a mistake is told before

    evaluate(config, command_of("jobs.evaluate", arguments))


if __name__ == "__main__":
    sys.exit(main())

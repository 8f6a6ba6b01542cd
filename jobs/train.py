"""`drafter train` or `python -m jobs.train`: train a draft head on distilled text."""

import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from pipeline.training.config import parse_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_config(arguments)
    from pipeline.training.job import train  # takes seconds: a mistake is told before

    train(config)


if __name__ == "__main__":
    sys.exit(main())

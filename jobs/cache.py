"""`drafter cache` or `python -m jobs.cache`: count the n-grams of a corpus, as a table for the drafter `cacheback`."""

import sys
from collections.abc import Sequence

from pipeline.cacheback.config import parse_config
from pipeline.command_line import run_job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_config(arguments)
    from pipeline.cacheback.job import make_table  # takes seconds: a mistake is told before

    make_table(config)


if __name__ == "__main__":
    sys.exit(main())

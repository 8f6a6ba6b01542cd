"""`drafter serve` or `python -m jobs.serve`: serve a model by OpenAI's API."""

import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from pipeline.serving.config import parse_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_config(arguments)
    from pipeline.serving.job import serve_until_signal  # takes seconds: a mistake is told before

    serve_until_signal(config)


if __name__ == "__main__":
    sys.exit(main())

"""`drafter distill` or `python -m jobs.distill`: let the target model answer prompts, as text for its draft head."""

import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from pipeline.generate.config import parse_distill_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    config = parse_distill_config(arguments)
    from pipeline.generate.job import generate  # takes seconds: a mistake is told before

    generate(config)


if __name__ == "__main__":
    sys.exit(main())

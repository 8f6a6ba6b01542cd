"""`drafter submit` or `python -m jobs.submit`: run a job on a cluster, and submit it again until it is done."""

import sys
from collections.abc import Sequence

from pipeline.cluster.submit_job import parse_submission, submit
from pipeline.command_line import run_job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns."""
    return run_job(lambda given: submit(*parse_submission(given)), arguments)


if __name__ == "__main__":
    sys.exit(main())

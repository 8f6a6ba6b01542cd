"""`drafter JOB …`: all jobs behind one command, which a folder `jobs` in the working directory does not hide."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from pipeline.command_line import did_you_mean

_JOBS = {
    "generate": "generate a text for every row of a dataset",
    "serve": "serve a model by OpenAI's API",
    "evaluate": "measure what drafters gain",
    "report": "show what a generation job has done as one page",
    "compare": "put two outputs of the same prompts side by side",
    "distill": "let the target model answer prompts, as text that its draft head learns from",
    "train": "train a draft head on distilled text",
    "submit": "run a job on a cluster, and submit it again until it is done",
}
_HELP = """\
usage: drafter JOB [settings]

Speculative decoding that never changes the tokens, for batches of prompts.

jobs:
{jobs}

`drafter JOB --help` shows a job's settings, `drafter --version` the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line names first (`sys.argv` by default), and return its exit code; see `run_job`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        jobs = "\n".join(f"  {name:10}{what}" for name, what in _JOBS.items())
        print(_HELP.format(jobs=jobs))
        return 0 if given else 2
    if given[0] == "--version":
        print(f"drafter {version('drafter')}")
        return 0
    if given[0] not in _JOBS:
        hint = did_you_mean(given[0], _JOBS) or f": use one of {', '.join(_JOBS)}"
        print(f"error: there is no job {given[0]!r}{hint}", file=sys.stderr)
        return 2
    return int(import_module(f"jobs.{given[0]}").main(given[1:]))


if __name__ == "__main__":
    sys.exit(main())

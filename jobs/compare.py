"""`drafter compare` or `python -m jobs.compare`: compare two outputs of the same prompts side by side."""

import sys

from pipeline.command_line import job_main
from pipeline.report.against.config import parse_config

main = job_main(parse_config, "pipeline.report.against.job:compare_or_audit")

if __name__ == "__main__":
    sys.exit(main())

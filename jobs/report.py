"""`drafter report` or `python -m jobs.report`: show what a generation job has done as one page."""

import sys

from pipeline.command_line import job_main
from pipeline.report.config import parse_config

main = job_main(parse_config, "pipeline.report.report_job:report")

if __name__ == "__main__":
    sys.exit(main())

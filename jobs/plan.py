"""`drafter plan` or `python -m jobs.plan`: find the best stack of drafters."""

import sys

from pipeline.command_line import job_main
from pipeline.evaluation.config import parse_plan

main = job_main(parse_plan, "pipeline.evaluation.plan_job:plan")

if __name__ == "__main__":
    sys.exit(main())

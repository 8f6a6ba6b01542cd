"""`python -m jobs.plan`: find the best stack of drafters."""

import sys

from pipeline.evaluation.plan_job import main

if __name__ == "__main__":
    sys.exit(main())

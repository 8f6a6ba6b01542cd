"""`python -m jobs.evaluate`: measure what drafters gain."""

import sys

from pipeline.evaluation.evaluate_job import main

if __name__ == "__main__":
    sys.exit(main())

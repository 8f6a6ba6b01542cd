"""`python -m jobs.report`: show what a generation job has done as one page."""

import sys

from pipeline.report.report_job import main

if __name__ == "__main__":
    sys.exit(main())

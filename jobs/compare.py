"""`python -m jobs.compare`: two outputs of the same prompts, side by side."""

import sys

from pipeline.report.against.job import main

if __name__ == "__main__":
    sys.exit(main())

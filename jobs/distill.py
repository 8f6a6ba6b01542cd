"""`python -m jobs.distill`: let the base answer prompts, for its draft head to learn from."""

import sys

from pipeline.generate.distill_job import main

if __name__ == "__main__":
    sys.exit(main())

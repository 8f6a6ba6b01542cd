"""`python -m jobs.distill`: let the base answer prompts, as text that its draft head learns from."""

import sys

from pipeline.generate.job import main

if __name__ == "__main__":
    sys.exit(main())

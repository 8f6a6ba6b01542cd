"""`python -m jobs.train`: train a draft head on distilled text."""

import sys

from pipeline.training.job import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m jobs.pivots`: which rejected draft tokens would make answers worse, and a classifier that tells them."""

import sys

from pipeline.pad.job import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m jobs.generate`: generate a text for every row of a dataset."""

import sys

from pipeline.generate.job import main

if __name__ == "__main__":
    sys.exit(main())

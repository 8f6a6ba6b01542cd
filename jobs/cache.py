"""`python -m jobs.cache`: count the n-grams of a corpus, as a table for the drafter `cacheback`."""

import sys

from pipeline.cacheback.job import main

if __name__ == "__main__":
    sys.exit(main())

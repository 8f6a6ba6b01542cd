"""`python -m jobs.cache`: count the n-grams of a corpus, as a table for the drafter `cacheback`."""

import sys

from pipeline.tables.cache_job import main

if __name__ == "__main__":
    sys.exit(main())

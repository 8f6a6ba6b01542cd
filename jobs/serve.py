"""`python -m jobs.serve`: serve a model by OpenAI's API."""

import sys

from pipeline.serving.job import main

if __name__ == "__main__":
    sys.exit(main())

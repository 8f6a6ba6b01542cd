"""`python -m jobs.submit`: run a job on a cluster, and submit it again until it is done."""

import sys

from pipeline.cluster.submit_job import main

if __name__ == "__main__":
    sys.exit(main())

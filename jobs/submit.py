"""`drafter submit` or `python -m jobs.submit`: run a job on a cluster, and submit it again until it is done."""

from pipeline.cluster.submit_job import parse_config
from pipeline.command_line import job_main

main = job_main(parse_config, "pipeline.cluster.submit_job:submit")

if __name__ == "__main__":
    raise SystemExit(main())

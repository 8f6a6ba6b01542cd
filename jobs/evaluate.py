"""`drafter evaluate` or `python -m jobs.evaluate`: measure what drafters gain."""

from pipeline.command_line import job_main
from pipeline.evaluation.config import parse_config

main = job_main(parse_config, "pipeline.evaluation.evaluate_job:evaluate", command="evaluate")

if __name__ == "__main__":
    raise SystemExit(main())

"""`drafter generate` or `python -m jobs.generate`: generate a text for every row of a dataset."""

from pipeline.command_line import job_main
from pipeline.generate.config import parse_config

main = job_main(parse_config, "pipeline.generate.job:generate")

if __name__ == "__main__":
    raise SystemExit(main())

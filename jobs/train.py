"""`drafter train` or `python -m jobs.train`: train a draft head on distilled text."""

from pipeline.command_line import job_main
from pipeline.training.config import parse_config

main = job_main(parse_config, "pipeline.training.job:train")

if __name__ == "__main__":
    raise SystemExit(main())

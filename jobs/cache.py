"""`drafter cache` or `python -m jobs.cache`: count the n-grams of a corpus, as a table for the drafter `cacheback`."""

from pipeline.cacheback.config import parse_config
from pipeline.command_line import job_main

main = job_main(parse_config, "pipeline.cacheback.job:make_table", resumes=False)

if __name__ == "__main__":
    raise SystemExit(main())

"""`drafter serve` or `python -m jobs.serve`: serve a model by OpenAI's API."""

from pipeline.command_line import job_main
from pipeline.serving.config import parse_config

main = job_main(parse_config, "pipeline.serving.job:serve_until_signal", resumes=False)

if __name__ == "__main__":
    raise SystemExit(main())

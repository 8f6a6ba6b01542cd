"""`drafter compare` or `python -m jobs.compare`: compare two outputs of the same prompts side by side."""

from pipeline.command_line import job_main
from pipeline.report.config import parse_comparison

main = job_main(parse_comparison, "pipeline.report.compare:compare", resumes=False)

if __name__ == "__main__":
    raise SystemExit(main())

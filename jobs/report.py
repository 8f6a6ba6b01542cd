"""`drafter report` or `python -m jobs.report`: show what a generation job has done as one page."""

from pipeline.command_line import job_main
from pipeline.report.config import parse_report

main = job_main(parse_report, "pipeline.report.page:report", resumes=False)

if __name__ == "__main__":
    raise SystemExit(main())

"""`drafter distill` or `python -m jobs.distill`: let the target model answer prompts, as text for its draft head."""

from pipeline.command_line import job_main
from pipeline.generate.config import parse_distill_config

main = job_main(parse_distill_config, "pipeline.generate.job:generate")

if __name__ == "__main__":
    raise SystemExit(main())

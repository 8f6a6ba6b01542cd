"""`drafter pivots` or `python -m jobs.pivots`: train the classifier of the verifier `pad`."""

from pipeline.command_line import job_main
from pipeline.pad.config import parse_config

main = job_main(parse_config, "pipeline.pad.job:pivots", command="pivots")

if __name__ == "__main__":
    raise SystemExit(main())

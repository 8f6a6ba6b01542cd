"""`drafter edge` or `python -m jobs.edge`: chat with a model on a server, which verifies what this device drafts."""

import sys

from pipeline.command_line import job_main
from pipeline.serving.edge_chat import parse_config

main = job_main(parse_config, "pipeline.serving.edge_chat:chat", resumes=False)

if __name__ == "__main__":
    sys.exit(main())

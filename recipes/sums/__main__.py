"""Make a base that adds up, one that drafts for it, and the sums to measure with: `python -m recipes.sums`.

    python -m recipes.sums --output build/sums

It takes a few minutes on two cores, and is the same each time. In the output are `base/`, `draft/`, `train.jsonl` and
`test.jsonl`; the sums of the last are in neither training nor the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.sums.problems import Problem, problems
from recipes.sums.training import BASE, DRAFT, Size, build_tokenizer, train

TEST_PROBLEMS = 500


def main(arguments: Sequence[str] | None = None, base: Size = BASE, draft: Size = DRAFT) -> int:
    """Make what a command line asks for; always returns 0.

    Args:
        arguments: The command line.
        base: Size of the base.
        draft: Size of the model that drafts.
    """
    parser = argparse.ArgumentParser(
        "python -m recipes.sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("build/sums"), help="folder (default: %(default)s)")
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    train(base, tokenizer, folder / "base")
    train(draft, tokenizer, folder / "draft", seed=1)
    _write(folder / "train.jsonl", problems(held_out=False))
    _write(folder / "test.jsonl", problems(held_out=True)[:TEST_PROBLEMS])
    print(f"written:  {folder}/base, {folder}/draft, {folder}/train.jsonl, {folder}/test.jsonl", flush=True)
    return 0


def _write(file: Path, some: Sequence[Problem]) -> None:
    lines = [json.dumps({"question": one.question, "answer": str(one.total)}) + "\n" for one in some]
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

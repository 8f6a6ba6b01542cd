"""Drafters behind prompts with images, beside plain decoding: acceptance length and tokens a second.

    python -m benchmarks.images --drafters exit:2 HEAD memory --output benchmarks/results/images

The model that sees answers questions about sheets with digits that were held out from all training. The drafters take
turns, and ratios are within a round. Prompts are part of the time, so a ratio is that of a whole job.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drafter.embedded import EMBEDDED_DIGITS
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.llm import SpeculativeLM
from drafter.statistics import mean_acceptance_length, per_second, speedup, total
from recipes.digits.questions import unseen

RECORD_FILE, TABLE_FILE = "images.json", "images.md"
PLAIN = "none"
_SEED = 30


@dataclass(frozen=True)
class Run:
    """One round of one drafter."""

    drafter: str
    batch: int
    tokens: int
    seconds: float
    acceptance_length: float
    differing: int  # answers that are not plain decoding's


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", required=True, help="drafters beside plain decoding")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", type=Path, default=EMBEDDED_DIGITS)
    parser.add_argument("--sheets", type=int, default=60, help="images (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    asked = conversations(args.sheets)
    runs: list[Run] = []
    for batch in args.batches:
        settings: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": 512, "num_draft_tokens": args.draft_tokens}
        models = {
            name: SpeculativeLM.from_pretrained(args.model, drafter=name, dtype="float32", config=settings)
            for name in (PLAIN, *args.drafters)
        }
        for number in range(-1, args.rounds):  # the first one warms up
            found = measure(models, batch, asked)
            runs += found if number >= 0 else []
        base = models[PLAIN].base
        for lm in models.values():
            lm.close()
    args.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.images", *given])
    record = {"environment": environment(base, command), "sheets": args.sheets, "runs": [asdict(run) for run in runs]}
    write_json(args.output / RECORD_FILE, record)
    print(write_page(args.output))


def conversations(number: int) -> list[list[dict[str, Any]]]:
    """Return a question about each of so many sheets of held-out digits."""
    asked = []
    for sheet, question in unseen(number, _SEED):
        content = [{"type": "image", "image": sheet.image}, {"type": "text", "text": question.text}]
        asked.append([{"role": "user", "content": content}])
    return asked


def measure(models: dict[str, SpeculativeLM], batch: int, asked: list[list[dict[str, Any]]]) -> list[Run]:
    """Answer all questions with each drafter in turn."""
    runs, plain = [], None
    for name, lm in models.items():
        begun = time.perf_counter()
        answers = lm.chat(asked, max_new_tokens=160, temperature=0.0)
        seconds = time.perf_counter() - begun
        texts = [answer.token_ids for answer in answers]
        plain = texts if plain is None else plain
        counts = total(answer.counts for answer in answers)
        differing = sum(one != other for one, other in zip(texts, plain, strict=True))
        runs.append(Run(name, batch, sum(map(len, texts)), seconds, mean_acceptance_length(counts), differing))
    return runs


def write_page(folder: Path) -> str:
    """Write the table of the record in `folder`; return it."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    runs = [Run(**run) for run in record["runs"]]
    by_arm: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        by_arm.setdefault((run.batch, run.drafter), []).append(run)
    rates = {arm: [per_second(run.tokens, run.seconds) for run in taken] for arm, taken in by_arm.items()}
    rows = [
        {
            "batch": batch,
            "drafter": Path(drafter).name,
            "β": f"{taken[0].acceptance_length:.2f}",
            "tokens/s": f"{median(rates[batch, drafter]):.0f}",
            "÷ plain": f"{speedup(rates[batch, drafter], rates[batch, PLAIN]):.2f}",
            "differing answers": f"{taken[0].differing} of {record['sheets']}",
        }
        for (batch, drafter), taken in by_arm.items()
    ]
    where = record["environment"]
    page = "\n\n".join(
        [
            "# Drafters behind prompts with images",
            f"{machine(where)}, {where['threads']} threads, {where['dtype']}; a model of "
            f"{where['base']['parameters']:,} parameters, and {record['sheets']} sheets of held-out digits with a "
            f"question each; greedy; medians of rounds. `{where['command']}`, commit {where['commit']}, "
            f"{where['date']}.",
            "β: new tokens per forward of the target model. ÷ plain: tokens a second of the whole job, images "
            "included, relative to plain decoding in the same round.",
            markdown_table(rows),
        ]
    )
    (folder / TABLE_FILE).write_text(page + "\n", encoding="utf-8")
    return page


if __name__ == "__main__":
    main()

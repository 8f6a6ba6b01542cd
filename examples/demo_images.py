"""`make demo-images`: a folder of images through the main job twice, plainly and with speculation.

The images are sheets with handwritten digits that the model has not learned from. Their answers, and a report that
shows each image beside its answer, go to `build/demo-images`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo import SPECULATIVE, read_runs, run_twice, show
from pipeline.command_line import run_job
from pipeline.report.outputs import open_output, rows_of
from recipes.digits.questions import unseen

OUTPUT = Path("build/demo-images")
CONFIG = "examples/images.yaml"
SHEETS, QUESTIONS = "sheets", "questions.jsonl"
_NUMBER, _SEED = 100, 20
_COMMAND = "python -m examples.demo_images"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration, and return the exit code; see `run_job`."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--sheets", type=int, default=_NUMBER, help="images (default: %(default)s)")
    number = parser.parse_args(arguments).sheets
    return run_job(lambda _: demonstrate(number), None, resumes=False)


def demonstrate(number: int) -> None:
    """Draw images, ask about them twice, compare, and print what came of it; run from the repository's root.

    Args:
        number: How many images.

    Raises:
        InputError: The model cannot be used.
        JobError: A run failed on the way.
        JobStopped: It was told to stop.
    """
    shutil.rmtree(OUTPUT, ignore_errors=True)  # or the jobs would find their work done
    draw(OUTPUT, number)
    run_twice(OUTPUT, ["--config", CONFIG])
    summary, counts, answers = read_runs(OUTPUT, _COMMAND)
    summary["accuracy"] = accuracy(OUTPUT)
    right = [f"Right answers: {summary['accuracy']:.1%} of {summary['rows']:,}.", ""]
    show(OUTPUT, summary, counts, answers, right, " --reading.images_column image")


def draw(folder: Path, number: int) -> None:
    """Write sheets as PNG files, and questions about them with their right answers as JSON lines."""
    (folder / SHEETS).mkdir(parents=True)
    lines = []
    for place, (sheet, question) in enumerate(unseen(number, _SEED)):
        name = f"{SHEETS}/{place:04}.png"
        sheet.image.save(folder / name)
        row = {"id": name, "image": name, "question": question.text, "right": question.answer}
        lines.append(json.dumps(row) + "\n")
    (folder / QUESTIONS).write_text("".join(lines), encoding="utf-8")


def accuracy(folder: Path) -> float:
    """Return the share of right answers in the run with speculation."""
    rows = rows_of(open_output(str(folder / SPECULATIVE)), ("text", "right"))
    right = [bool(row["text"] == row["right"]) for row in rows]
    return round(sum(right) / len(right), 4)


if __name__ == "__main__":
    sys.exit(main())

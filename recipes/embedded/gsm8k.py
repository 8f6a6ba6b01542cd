"""GSM8K as the recipe splits it.

A base's answers to prompts that it has memorised are unlike its other answers, and a draft head that is trained on them
predicts other answers badly. So a part of the training split is used for distillation only, and not to train the base.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow

DATA = Path(__file__).resolve().parents[2] / "data" / "gsm8k"
BASE_END = 5_400
DISTILL_END = 7_200


@dataclass(frozen=True)
class Problem:
    """One GSM8K problem: a question and its worked solution with calculator annotations."""

    question: str
    answer: str


def read_split(name: str) -> list[Problem]:
    """Read one part of GSM8K.

    Args:
        name: `base` (train rows 0–5,399), `distill` (train rows 5,400–7,199), `validation` (train rows 7,200–7,472; for
            choosing checkpoints) or `test` (used for neither training nor choosing).
    """
    file = "test.jsonl" if name == "test" else "train.jsonl.gz"
    with pyarrow.input_stream(str(DATA / file)) as text:  # it unpacks what is compressed
        rows = map(json.loads, text.read().splitlines())
    problems = [Problem(row["question"], row["answer"]) for row in rows]
    spans = {
        "base": slice(0, BASE_END),
        "distill": slice(BASE_END, DISTILL_END),
        "validation": slice(DISTILL_END, None),
        "test": slice(None),
    }
    return problems[spans[name]]

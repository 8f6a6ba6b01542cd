"""Rounds of prompts and answers: each is finished by itself, so that training need not wait for the last.

A round has a folder:

- `openings.jsonl`: where the model writes a question each; `questions/` is what it wrote by `drafter generate`;
- `prompts.jsonl`: the questions that are of use, and questions of GSM8K's training split;
- `answers/`: the model's answers, as `drafter distill` leaves them and `drafter train` takes them.

What is there is not made again. A round follows from its number and from the rounds before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

from drafter.text.tokenizers import load_tokenizer
from recipes.smollm2.kinds import prompts as prompts_of_kinds
from recipes.smollm2.magpie import choose, opening

HERE = Path(__file__).parent
DATA = Path(__file__).resolve().parents[2] / "data"
OPENINGS = 400
"""Questions that the model writes in a round, of which some are of use."""
PROBLEMS = 500
"""Questions of GSM8K's training split in a round."""
KINDS = 500
"""Prompts of the kinds of `kinds.py` in a round."""
LAST_PROBLEM = 7_200
"""The training split's rows from here on are kept back, as in `recipes/embedded/gsm8k.py`."""
SAMPLED = 0.7
"""Every third prompt is answered at this temperature, and the others greedily."""


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        number: From 1.
        folder: The folder of all rounds.
    """

    number: int
    folder: Path

    @property
    def openings(self) -> Path:
        return self._file("openings.jsonl")

    @property
    def questions(self) -> Path:
        return self._file("questions")

    @property
    def prompts(self) -> Path:
        return self._file("prompts.jsonl")

    @property
    def answers(self) -> Path:
        return self._file("answers")

    def _file(self, name: str) -> Path:
        return self.folder / f"round-{self.number:02d}" / name


def write_openings(one: Round, model: Path) -> None:
    """Write the openings of a round, each named by its number, from which its seed follows."""
    tokenizer = load_tokenizer(model)
    openings = [opening(tokenizer, system) for system in yaml.safe_load((HERE / "openings.yaml").read_text())]
    first = (one.number - 1) * OPENINGS
    numbers = range(first, first + OPENINGS)
    _write(one.openings, ({"number": number, "prompt": openings[number % len(openings)]} for number in numbers))


def write_prompts(one: Round) -> None:
    """Choose a round's prompts: the questions that the model wrote, GSM8K's training split, and other kinds."""
    known = [row["prompt"] for number in range(1, one.number) for row in _read(Round(number, one.folder).prompts)]
    questions = choose(generated(one.questions), known + measured_questions())
    problems = [row["question"] for row in _read(DATA / "gsm8k" / "train.jsonl.gz")][:LAST_PROBLEM]
    texts = prompts_of_kinds(KINDS, problems, seed=one.number)
    problems = problems[(one.number - 1) * PROBLEMS : one.number * PROBLEMS]
    sources = [("magpie", text) for text in questions] + [("gsm8k", text) for text in problems] + texts
    _write(one.prompts, prompt_rows(sources))


def prompt_rows(sources: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield rows for `drafter distill`, each with its temperature, of prompts and where each of them is from."""
    for number, (source, text) in enumerate(sources):
        yield {"prompt": text, "source": source, "sampling": {"temperature": SAMPLED if number % 3 == 2 else 0.0}}


def measured_questions() -> list[str]:
    """Return the questions that heads are measured on; none of them may become a prompt."""
    chats = [turn for row in _read(DATA / "chat-prompts" / "questions.jsonl") for turn in row["turns"]]
    return chats + [row["question"] for row in _read(DATA / "gsm8k" / "test.jsonl")]


def generated(output: Path) -> list[dict[str, Any]]:
    """Read the questions that a model wrote, by the numbers of their openings."""
    columns = ["number", "text", "finish_reason", "num_output_tokens"]
    rows = pyarrow.parquet.read_table(output / "data", columns=columns).to_pylist()
    return sorted(rows, key=lambda row: int(row["number"]))


def _read(file: Path) -> list[Any]:
    with pyarrow.input_stream(str(file)) as text:  # it unpacks what is compressed
        return [json.loads(line) for line in text.read().splitlines()]


def _write(file: Path, rows: Iterable[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
    """Write a file of JSON lines, which appears when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(file)

"""Rows as the page shows them step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.base.loading import load_tokenizer
from drafter.errors import LoadError
from pipeline.report.row_steps import Step, steps_of, text_pieces

_STEPS = "per_step_accepted"


@dataclass(frozen=True)
class Example:
    """A row with its steps.

    Args:
        row: All its columns.
        prompt: What the model was given, as text.
        steps: The decode steps that made its text.
    """

    row: Mapping[str, Any]
    prompt: str
    steps: Sequence[Step]


def make_examples(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[list[Example], list[str]]:
    """Return rows with their steps, and sentences on what cannot be shown of them.

    Args:
        rows: The rows, with all their columns.
        model: The base model, whose tokenizer gives the texts; it is not downloaded.
    """
    tokenizer, missing = None, []
    try:
        tokenizer = load_tokenizer(model, local_files_only=True)
    except LoadError:
        missing.append(f"Tokens are shown as numbers: the tokenizer of {model} is not on this machine")
    if any(_STEPS not in row for row in rows):
        missing.append(f"The steps cannot be shown: the output has no column {_STEPS}")
    examples = []
    for row in rows:
        ids = row["prompt_token_ids"]
        prompt = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        pieces = text_pieces(tokenizer, row["token_ids"])
        steps = steps_of(pieces, row.get(_STEPS, [0] * len(pieces)), row.get("lenient_positions") or ())
        examples.append(Example(row, prompt, steps))
    return examples, missing

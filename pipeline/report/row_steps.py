"""A row's tokens as the steps that made them: each a run of accepted draft tokens, then the base's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drafter.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Step:
    """What one decode step gave.

    Args:
        number: From 1.
        accepted: Number of draft tokens accepted.
        drafted: Their text.
        own: Text of the base's own token after them; empty where the row ended before it.
    """

    number: int
    accepted: int
    drafted: str
    own: str


def steps_of(pieces: Sequence[str], per_step_accepted: Sequence[int]) -> list[Step]:
    """Share out a row's pieces of text among its steps; a step gives one more token than it accepts."""
    steps, start = [], 0
    for number, accepted in enumerate(per_step_accepted, start=1):
        end = start + accepted
        steps.append(Step(number, accepted, "".join(pieces[start:end]), "".join(pieces[end : end + 1])))
        start = end + 1
    return steps


def text_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Each token's part of the text; the ids themselves without a `tokenizer`.

    A character of several tokens is with its last one, and special tokens have their names.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    special = set(tokenizer.all_special_ids)
    detokenizer = Detokenizer(tokenizer)
    lengths = [0, *(len(detokenizer.push(token)) for token in token_ids)]
    pieces = [detokenizer.text[before:after] for before, after in pairwise(lengths)]
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return [
        str(name) if token in special else piece for token, piece, name in zip(token_ids, pieces, names, strict=True)
    ]

"""A row's text as its decode steps: each a run of accepted draft tokens, then the base's own token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Step:
    """What one decode step added to the text.

    Args:
        number: The step's place, from 1.
        accepted: How many draft tokens it accepted.
        drafted: Their text.
        own: Text of the base's own token after them; empty where the row ended before it.
    """

    number: int
    accepted: int
    drafted: str
    own: str


def steps_of(pieces: Sequence[str], per_step_accepted: Sequence[int]) -> list[Step]:
    """Return a row's steps.

    Args:
        pieces: The text of each of its tokens.
        per_step_accepted: How many draft tokens each step accepted; it added one token more.
    """
    steps, start = [], 0
    for number, accepted in enumerate(per_step_accepted, start=1):
        end = start + accepted
        steps.append(Step(number, accepted, "".join(pieces[start:end]), "".join(pieces[end : end + 1])))
        start = end + 1
    return steps


def text_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text; the ids themselves where `tokenizer` is None.

    A character of several tokens belongs to the last of them. Special tokens have their names.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    special = set(tokenizer.all_special_ids)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in token_ids]
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return [
        str(name) if token in special else piece for token, piece, name in zip(token_ids, pieces, names, strict=True)
    ]

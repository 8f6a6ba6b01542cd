"""A row's text as its decode steps: each a run of accepted draft tokens, then the base's own token."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Run:
    """Draft tokens one after another that a step accepted for the same reason.

    Args:
        text: Their text.
        lenient: Whether the base would have chosen others.
    """

    text: str
    lenient: bool = False


@dataclass(frozen=True)
class Step:
    """What one decode step added to the text.

    Args:
        number: The step's place, from 1.
        accepted: How many draft tokens it accepted.
        runs: Their text.
        own: Text of the base's own token after them; empty where the row ended before it.
    """

    number: int
    accepted: int
    runs: tuple[Run, ...]
    own: str

    @property
    def drafted(self) -> str:
        """Text of the draft tokens."""
        return "".join(run.text for run in self.runs)


def steps_of(
    pieces: Sequence[str], per_step_accepted: Sequence[int], lenient_positions: Collection[int] = ()
) -> list[Step]:
    """Return a row's steps.

    Args:
        pieces: The text of each of its tokens.
        per_step_accepted: How many draft tokens each step accepted; it added one token more.
        lenient_positions: Places of tokens that the base would not have chosen.
    """
    lenient = set(lenient_positions)
    steps, start = [], 0
    for number, accepted in enumerate(per_step_accepted, start=1):
        end = min(start + accepted, len(pieces))
        groups = itertools.groupby(range(start, end), lenient.__contains__)
        runs = tuple(Run("".join(pieces[place] for place in places), marked) for marked, places in groups)
        steps.append(Step(number, accepted, runs, "".join(pieces[start + accepted : start + accepted + 1])))
        start += accepted + 1
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

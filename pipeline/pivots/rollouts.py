"""Continuations with and without each rejected token: as requests, and what they are worth."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drafter.pivots.pivot_training import is_pivot
from drafter.text.stop_strings import cut_at_stop
from pipeline.compare.scorers import Scorer
from pipeline.staging.samples import hashed_seed

Side = Literal["with", "without"]
SIDES: tuple[Side, ...] = ("with", "without")
_TOKEN: dict[Side, str] = {"with": "rejected", "without": "chosen"}
_SEEDS = 2**31


def requests_of(tokens: Iterable[Mapping[str, Any]], rollouts: int, temperature: float) -> Iterator[str]:
    """Yield lines of an OpenAI batch: for each token a text that goes on with it, and one that goes on without.

    A token that ends the text needs no continuation.

    Args:
        tokens: Rows of `REJECTION_TYPE`.
        rollouts: Continuations of each text.
        temperature: Their temperature.
    """
    for number, token in enumerate(tokens):
        for side in SIDES:
            if token[f"{_TOKEN[side]}_ends"]:
                continue
            body = {
                "model": "base",
                "prompt": [*token["prefix"], token[_TOKEN[side]]],
                "max_tokens": token["left"],
                "n": rollouts,
                "temperature": temperature,
                "seed": hashed_seed(number, side) % _SEEDS,
            }
            line = {"custom_id": f"{number}-{side}", "method": "POST", "url": "/v1/completions", "body": body}
            yield json.dumps(line) + "\n"


@dataclass(frozen=True)
class Label:
    """What a rejected token does to answers.

    Args:
        number: Which token, in the order of their file.
        utility_with: Mean utility of the answers with it.
        utility_without: Mean utility of those without.
        rollouts_with: How many answers with it were scored.
        rollouts_without: How many without.
    """

    number: int
    utility_with: float
    utility_without: float
    rollouts_with: int
    rollouts_without: int

    @property
    def pivot(self) -> bool:
        """Whether it makes answers worse."""
        return is_pivot(self.utility_with, self.utility_without)


def continuations_by_side(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, Side], list[list[int]]]:
    """Return the tokens of all continuations, by token and side.

    Args:
        rows: Rows of the generation job that answered `requests_of`.
    """
    found: dict[tuple[int, Side], list[list[int]]] = defaultdict(list)
    for row in rows:
        number, _, side = row["custom_id"].partition("-")
        found[int(number), "with" if side == "with" else "without"].append(row["token_ids"])
    return found


def labels_of(
    tokens: Sequence[Mapping[str, Any]],
    continuations: Mapping[tuple[int, Side], Sequence[Sequence[int]]],
    answers: Mapping[str, Mapping[str, Any]],
    scorer: Scorer,
    decode: Callable[[list[int]], str],
    stop: Sequence[str],
) -> Iterator[Label]:
    """Yield a label for each token that has answers on both sides.

    Args:
        tokens: Rows of `REJECTION_TYPE`.
        continuations: See `continuations_by_side`.
        answers: Rows of exact decoding, by name.
        scorer: Says what a row is worth.
        decode: Makes a text of tokens.
        stop: Strings that end a text.

    Raises:
        InputError: The scorer cannot score an answer.
    """
    for number, token in enumerate(tokens):
        answer = answers[token["request_id"]]
        scores: dict[Side, list[float]] = {}
        for side in SIDES:
            begin = [*answer["token_ids"][: token["place"]], token[_TOKEN[side]]]
            ends: Sequence[Sequence[int]] = (
                [[]] if token[f"{_TOKEN[side]}_ends"] else continuations.get((number, side), [])
            )
            texts = [(ids, cut_at_stop(decode(ids), stop)) for ids in ([*begin, *end] for end in ends)]
            scores[side] = [scorer({**answer, "token_ids": ids, "text": text}) for ids, text in texts]
        if all(scores.values()):
            means = [sum(some) / len(some) for some in scores.values()]
            yield Label(number, means[0], means[1], *(len(some) for some in scores.values()))

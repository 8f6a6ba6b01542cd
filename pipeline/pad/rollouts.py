"""Continuations with and without each rejected token: requests, and labels from their scores."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drafter.methods.pad.training import is_pivot
from drafter.requests import SamplingParams, hashed_seed
from drafter.text.streaming import cut_at_stop
from pipeline.errors import InputError
from pipeline.report.audit import RepeatedRow
from pipeline.report.scorers import Scorer, scores_of

Side = Literal["with", "without"]
SIDES: tuple[Side, ...] = ("with", "without")
_TOKEN: dict[Side, str] = {"with": "rejected", "without": "chosen"}
_SEEDS = 2**31
_OF_A_REQUEST = frozenset({"max_new_tokens", "temperature", "seed", "logprobs"})
"""Settings that a row may have of its own: a continuation brings them itself, or they change none of its tokens."""


def refuse_own_settings(rows: Iterable[RepeatedRow], job: SamplingParams) -> None:
    """Refuse rows whose continuations would be made by other settings than their answers.

    Continuations are requests of one job, and an OpenAI body cannot express all settings of a row: it has no
    `ignore_eos`, and fewer stop strings.

    Raises:
        InputError: A row has settings of its own.
    """
    common = asdict(job.over())
    for row in rows:
        own = asdict(row.request.sampling.over())
        if names := [name for name in common if name not in _OF_A_REQUEST and own[name] != common[name]]:
            flags = ", ".join(f"--sampling.{name}" for name in names)
            raise InputError(
                f"row {row.request.request_id} has sampling settings of its own ({', '.join(names)}), but "
                f"continuations have the job's: leave them out of the rows and give them to all by {flags}, or leave "
                "such rows out"
            )


def requests_of(tokens: Iterable[Mapping[str, Any]], rollouts: int, temperature: float) -> Iterator[str]:
    """Yield lines of an OpenAI batch: texts that continue with each rejected token, and with the target model's choice.

    A token that ends the text needs no continuation.
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
    """Mean utility of answers with a rejected token and without it; `number` is the token's index in its file."""

    number: int
    utility_with: float
    utility_without: float
    rollouts_with: int
    rollouts_without: int

    @property
    def pivot(self) -> bool:
        """True if it makes answers worse."""
        return is_pivot(self.utility_with, self.utility_without)


def continuations_by_side(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, Side], list[NDArray[np.int32]]]:
    """Return all answers to `requests_of` by token and side. They are arrays, because all are in memory at once."""
    found: dict[tuple[int, Side], list[NDArray[np.int32]]] = defaultdict(list)
    for row in rows:
        number, _, side = row["custom_id"].partition("-")
        found[int(number), "with" if side == "with" else "without"].append(np.array(row["token_ids"], np.int32))
    return found


def labels_of(
    tokens: Sequence[Mapping[str, Any]],
    continuations: Mapping[tuple[int, Side], Sequence[NDArray[np.int32]]],
    answers: Mapping[str, Mapping[str, Any]],
    scorer: Scorer,
    decode: Callable[[list[int]], str],
    stop: Sequence[str],
) -> Iterator[Label]:
    """Yield a label for each token that has answers on both sides.

    Args:
        tokens: Rows of `REJECTION_TYPE`; `prefix`, `left` and `hidden` are not read.
        continuations: See `continuations_by_side`.
        answers: Rows of exact decoding, by name.

    Raises:
        InputError: The scorer cannot score an answer, or gives a negative score.
    """
    for number, token in enumerate(tokens):
        answer = answers[token["request_id"]]
        scores: dict[Side, list[float]] = {}
        for side in SIDES:
            begin = [*answer["token_ids"][: token["place"]], token[_TOKEN[side]]]
            made = continuations.get((number, side), [])
            ends: list[list[int]] = [[]] if token[f"{_TOKEN[side]}_ends"] else [one.tolist() for one in made]
            token_ids = [[*begin, *end] for end in ends]
            texts = [cut_at_stop(decode(ids), stop) for ids in token_ids]
            scores[side] = scores_of([answer] * len(token_ids), token_ids, texts, scorer)
            if (worst := min(scores[side], default=0.0)) < 0:
                raise InputError(
                    f"the scorer finds an answer of row {token['request_id']} worth {worst:g}: pivots are told by "
                    "shares of what answers are worth, which mean nothing below 0: return numbers of at least 0"
                )
        if all(scores.values()):
            means = [sum(some) / len(some) for some in scores.values()]
            yield Label(number, means[0], means[1], *(len(some) for some in scores.values()))

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from drafter.methods.pad.method import BaseOfClassifier
from drafter.methods.pad.training import Rejection
from drafter.requests import Request, SamplingParams
from pipeline.errors import InputError
from pipeline.openai.batch import parse_line
from pipeline.pad.config import PivotsConfig, PivotsFolder
from pipeline.pad.labels import (
    REJECTION_TYPE,
    continuations_by_side,
    features_of,
    is_held_out,
    labelled,
    labels_of,
    read_table,
    refuse_own_settings,
    requests_of,
    tokens_of,
    write_table,
)
from pipeline.pad.steps import PivotSteps
from pipeline.report.audit import RepeatedRow

ROWS = [
    RepeatedRow(Request([1, 2], SamplingParams(6), "a"), [3, 4, 5, 9]),
    RepeatedRow(Request([1, 2, 3], SamplingParams(6), "b"), [7, 8]),
]


def rejection(prefix: list[int], rejected: int, chosen: int, prompt: int = 2) -> Rejection:
    return Rejection(prefix, prompt, rejected, chosen, 0.5, 0.25, torch.tensor([1.0, float(rejected)]))


def token(**columns: Any) -> dict[str, Any]:
    (found,) = tokens_of(ROWS[:1], [rejection([1, 2, 3], 30, 4)], frozenset({9}), 5)
    return {**found, **columns}


def label(number: int, with_it: float, without: float, *rollouts: int, pivot: bool) -> dict[str, Any]:
    counts = {"rollouts_with": rollouts[0], "rollouts_without": rollouts[1]}
    return {"number": number, "utility_with": with_it, "utility_without": without, **counts, "pivot": pivot}


def test_rejections_are_given_to_the_row_that_they_are_of() -> None:
    noted = [
        rejection([1, 2], 30, 3),  # the first token of a
        rejection([1, 2, 3, 4, 5], 30, 9),  # of a, where the base ends the text
        rejection([1, 2, 3, 7], 9, 8, prompt=3),  # of b, where the draft would have ended it
        rejection([1, 2, 3], 30, 6),  # neither a nor b goes on with 6
        rejection([1, 2, 8], 30, 4),  # a text that nobody has asked for
    ]
    found = list(tokens_of(ROWS, noted, frozenset({9}), 5))
    assert [(one["request_id"], one["place"], one["left"]) for one in found] == [("a", 0, 5), ("a", 3, 2), ("b", 1, 4)]
    assert [(one["rejected_ends"], one["chosen_ends"]) for one in found] == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert [len(list(tokens_of(ROWS, noted, frozenset(), most))) for most in (1, 2)] == [2, 3]
    # A prompt that is the beginning of another has rejections of its own.
    both = list(tokens_of(ROWS, [rejection([1, 2, 3], 30, 4), rejection([1, 2, 3], 30, 7, prompt=3)], frozenset(), 5))
    assert [(one["request_id"], one["place"]) for one in both] == [("a", 1), ("b", 0)]


class Unread:
    """A hidden state that nobody may make Python numbers of."""

    def tolist(self) -> list[float]:
        raise AssertionError("a rejection that is not kept takes the memory of one that is")


def test_only_rejections_that_are_kept_become_rows() -> None:
    noted = [rejection([1, 2, *ROWS[0].token_ids[:place]], 30, ROWS[0].token_ids[place]) for place in range(4)]
    (kept,) = tokens_of(ROWS[:1], noted, frozenset(), 1)
    others = [
        one if place == kept["place"] else replace(one, hidden=cast(Tensor, Unread()))
        for place, one in enumerate(noted)
    ]
    assert list(tokens_of(ROWS[:1], others, frozenset(), 1)) == [kept]


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"stop": ("#",)}, "stop"),
        ({"stop": ()}, "stop"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"top_p": 0.9, "presence_penalty": 1.0}, "top_p, presence_penalty"),
        ({"logit_bias": {7: 1.0}}, "logit_bias"),
    ],
)
def test_rows_that_continuations_cannot_follow_are_refused(own: dict[str, Any], names: str, tmp_path: Path) -> None:
    job = SamplingParams(6, stop=("END",))
    of_the_row = replace(job, max_new_tokens=9, temperature=0.7, seed=5, logprobs=2)
    rows = [RepeatedRow(Request([1], of_the_row, "a"), [3])]
    refuse_own_settings(rows, job)
    rows.append(RepeatedRow(Request([1], replace(of_the_row, **own), "b"), [3]))
    with pytest.raises(InputError, match=rf"row b has sampling settings of its own \({names}\)") as refused:
        refuse_own_settings(rows, job)
    flags = ", ".join(f"--sampling.{name}" for name in names.split(", "))
    assert f"give them to all by {flags}, or leave such rows out" in str(refused.value)
    # The job asks before it searches.
    steps = PivotSteps(PivotsConfig("in", "out", "number", sampling=job), PivotsFolder(tmp_path), lambda row: 0.0)
    steps._answered = lambda: rows  # type: ignore[method-assign]
    with pytest.raises(InputError, match="row b has sampling settings"):
        steps.find_tokens()


def test_a_token_in_the_last_place_has_nothing_to_continue() -> None:
    row = RepeatedRow(Request([1], SamplingParams(2), "a"), [3, 4])
    noted = [rejection([1], 8, 3, prompt=1), rejection([1, 3], 8, 4, prompt=1)]
    assert [one["place"] for one in tokens_of([row], noted, frozenset(), 5)] == [0]


def test_each_text_is_continued_with_the_token_and_without() -> None:
    ends = token(rejected_ends=True)
    lines = [json.loads(line) for line in requests_of([token(), ends], 20, 0.7)]
    assert [line["custom_id"] for line in lines] == ["0-with", "0-without", "1-without"]
    asked = [parse_line({**line, "body": json.dumps(line["body"])}) for line in lines]
    assert asked[0].prompts == ([1, 2, 3, 30],)
    assert asked[1].prompts == ([1, 2, 3, 4],)
    assert {one.n for one in asked} == {20}
    sampling = [one.sampling(SamplingParams()) for one in asked]
    assert {(one.temperature, one.max_new_tokens) for one in sampling} == {(0.7, 4)}
    assert len({one.seed for one in sampling}) == 3


def test_answers_are_scored_whole_and_means_make_the_label() -> None:
    def even(row: Mapping[str, Any]) -> float:
        json.dumps(row["token_ids"])  # they are Python's numbers, whatever continuations are kept as
        assert row["answer"] == "42"
        return float(len(row["text"].split()) % 2 == 0)

    rows = [
        {"custom_id": "0-with", "token_ids": [5, 6]},  # 3 30 5 6
        {"custom_id": "0-with", "token_ids": [5]},
        {"custom_id": "0-without", "token_ids": [5, 6]},
        {"custom_id": "0-without", "token_ids": [5, 6, 8, 8, 8]},  # ends before the 8
        {"custom_id": "1-without", "token_ids": [5]},
    ]
    tokens = [token(), token(rejected_ends=True), token()]
    answers = {"a": {"request_id": "a", "answer": "42", "token_ids": [3, 4, 5, 9], "text": "another"}}
    sides = continuations_by_side(rows)
    assert {one.dtype for some in sides.values() for one in some} == {np.dtype(np.int32)}
    unread = ("prefix", "left", "hidden")
    tokens = [{name: value for name, value in one.items() if name not in unread} for one in tokens]
    found = list(labels_of(tokens, sides, answers, even, lambda ids: " ".join(map(str, ids)), ["8"]))
    assert found == [label(0, 0.5, 1.0, 2, 2, pivot=True), label(1, 1.0, 0.0, 1, 1, pivot=False)]


def test_an_answer_that_is_worth_less_than_nothing_is_refused() -> None:
    answers = {"a": {"request_id": "a", "token_ids": [3, 4, 5, 9], "text": ""}}
    rows = [{"custom_id": "0-with", "token_ids": [5]}, {"custom_id": "0-without", "token_ids": [6]}]

    def penalty(row: Mapping[str, Any]) -> float:
        return -1.5 if row["token_ids"][-1] == 6 else 0.0

    message = "an answer of row a worth -1.5: .* return numbers of at least 0"
    with pytest.raises(InputError, match=message):
        list(labels_of([token()], continuations_by_side(rows), answers, penalty, str, []))


def test_labels_are_a_table_that_a_classifier_reads(tmp_path: Path) -> None:
    tokens = pa.Table.from_pylist([token(), token(request_id="b", rejected=31, hidden=[1.0, 31.0])], REJECTION_TYPE)
    table = labelled(tokens, [label(1, 0.2, 0.8, 20, 19, pivot=True)], 0.5)
    base = BaseOfClassifier("tiny", "v2-1", 3)
    write_table(table, tmp_path / "labels.parquet", base)
    again, facts = read_table(tmp_path / "labels.parquet")
    assert facts == base
    (row,) = again.to_pylist()
    assert row["request_id"] == "b"
    assert (row["utility_with"], row["utility_without"], row["rollouts_with"], row["rollouts_without"]) == (
        0.2,
        0.8,
        20,
        19,
    )
    features, pivots = features_of(again)
    assert pivots.tolist() == [True]
    assert features.hidden.tolist() == [[1, 31]]
    assert features.values.tolist() == [[1, 31, 0.5, 0.25]]
    # A table in pieces, of which a filter has left some rows out.
    pieces = pa.concat_tables([tokens, tokens]).append_column("pivot", pa.array([True, False, False, True]))
    features, pivots = features_of(pieces.filter(pa.array([False, True, True, True])))
    assert features.hidden.dtype == torch.float32
    assert features.hidden.tolist() == [[1, 31], [1, 30], [1, 31]]
    assert pivots.tolist() == [False, False, True]


def test_a_share_of_the_prompts_is_held_out() -> None:
    names = [f"row {number}" for number in range(2000)]
    assert sum(is_held_out(name, 0.25) for name in names) == pytest.approx(500, abs=80)
    assert {name for name in names if is_held_out(name, 0.1)} < {name for name in names if is_held_out(name, 0.4)}

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from drafter.prompt import Prompt, Span
from drafter.requests import Request, SamplingParams
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig
from pipeline.generate.row_requests import row_sampling
from recipes.pad.labels import (
    REJECTION_TYPE,
    RepeatedRow,
    features_of,
    is_held_out,
    labelled,
    prompts_of,
    rows_to_repeat,
    tokens_of,
    worth,
)
from recipes.pad.training import Rejection
from tests.pipeline.report.outputs import write_output
from tests.support.models import SpellingTokenizer

ROWS = [
    RepeatedRow(Request([1, 2], SamplingParams(6, stop=("8",)), "a"), [3, 4, 5, 9]),
    RepeatedRow(Request([1, 2, 3], SamplingParams(6), "b"), [7, 8]),
]


def rejection(prefix: list[int], rejected: int, chosen: int, prompt: int = 2) -> Rejection:
    return Rejection(prefix, prompt, rejected, chosen, 0.5, 0.25, torch.tensor([1.0, float(rejected)]))


def token(**columns: Any) -> dict[str, Any]:
    (found,) = tokens_of(ROWS[:1], [rejection([1, 2, 3], 30, 4)], frozenset({9}), 5)
    return {**found, **columns}


def table(*tokens: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(tokens), REJECTION_TYPE)


def test_rejections_are_given_to_the_row_that_they_are_of() -> None:
    noted = [
        rejection([1, 2], 30, 3),  # the first token of a
        rejection([1, 2, 3, 4, 5], 30, 9),  # of a, where the base ends the text
        rejection([1, 2, 3, 7], 9, 8, prompt=3),  # of b, where the draft would have ended it
        rejection([1, 2, 3], 30, 6),  # neither a nor b goes on with 6
        rejection([1, 2, 8], 30, 4),  # a text that nobody has asked for
    ]
    found = list(tokens_of(ROWS, noted, frozenset({9}), 5))
    left = [json.loads(one["sampling"])["max_new_tokens"] for one in found]
    assert [(one["request_id"], one["place"]) for one in found] == [("a", 0), ("a", 3), ("b", 1)]
    assert left == [5, 2, 4]
    assert [(one["rejected_ends"], one["chosen_ends"]) for one in found] == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert [len(list(tokens_of(ROWS, noted, frozenset(), most))) for most in (1, 2)] == [2, 3]
    # A prompt that is the beginning of another has rejections of its own.
    both = list(tokens_of(ROWS, [rejection([1, 2, 3], 30, 4), rejection([1, 2, 3], 30, 7, prompt=3)], frozenset(), 5))
    assert [(one["request_id"], one["place"]) for one in both] == [("a", 1), ("b", 0)]


def test_a_rejection_is_nobodys_where_equal_ids_stand_for_two_images() -> None:
    rows = [
        RepeatedRow(Request(Prompt([1, 2], (Span(1, 2, image),)), SamplingParams(6), name), [3, 4, 5])
        for name, image in (("a", b"one"), ("b", b"other"), ("c", b"one"))
    ]
    found = [list(tokens_of(some, [rejection([1, 2, 3], 30, 4)], frozenset(), 5)) for some in (rows, rows[::2])]
    assert [[one["request_id"] for one in some] for some in found] == [[], ["a", "c"]]


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


def test_a_token_in_the_last_place_has_nothing_to_continue() -> None:
    row = RepeatedRow(Request([1], SamplingParams(2), "a"), [3, 4])
    noted = [rejection([1], 8, 3, prompt=1), rejection([1, 3], 8, 4, prompt=1)]
    assert [one["place"] for one in tokens_of([row], noted, frozenset(), 5)] == [0]


def test_each_text_is_continued_with_the_token_and_without() -> None:
    rows = prompts_of({**token(), "number": 0}, 20, 0.7)
    assert [(row["side"], row["rollout"]) for row in rows] == [(s, n) for s in ("with", "without") for n in range(20)]
    assert {tuple(row["prompt_token_ids"]) for row in rows[:20]} == {(1, 2, 3, 30)}
    assert {tuple(row["prompt_token_ids"]) for row in rows[20:]} == {(1, 2, 3, 4)}
    ends = prompts_of({**token(rejected_ends=True), "number": 1}, 2, 0.7)
    assert [(row["number"], row["side"], row["rollout"]) for row in ends] == [(1, "without", 0), (1, "without", 1)]
    sampling = [row_sampling(SamplingParams(), "", row, "sampling_params") for row in [*rows, *ends]]
    assert {(one.temperature, one.max_new_tokens, one.stop) for one in sampling} == {(0.7, 4, ("8",))}
    assert len({one.seed for one in sampling}) == 42


def test_a_continuation_has_the_settings_of_its_row() -> None:
    own = SamplingParams(6, ignore_eos=True, top_p=0.9, logit_bias={7: 1.0}, min_tokens=4, bad_words=("no",))
    row = RepeatedRow(Request([1, 2], own, "a"), [3, 4, 5, 9])
    (found,) = tokens_of([row], [rejection([1, 2, 3], 9, 4)], frozenset({9}), 5)
    assert not found["rejected_ends"]  # 9 ends no text here
    (first, *_) = prompts_of({**found, "number": 0}, 1, 0.7)
    sampling = row_sampling(SamplingParams(), "", first, "sampling_params")
    expected = replace(own, temperature=0.7, max_new_tokens=4, min_tokens=2, seed=sampling.seed)
    assert sampling.over() == expected.over()


def test_answers_are_scored_whole_and_means_make_the_label() -> None:
    def even(row: Mapping[str, Any]) -> float:
        assert row["answer"] == "42"
        return float(len(row["text"].split()) % 2 == 0)

    sampled = [
        {"number": 0, "side": "with", "rollout": 1, "token_ids": [5, 6]},  # 3 30 5 6
        {"number": 0, "side": "with", "rollout": 0, "token_ids": [5]},
        {"number": 0, "side": "without", "rollout": 0, "token_ids": [5, 6]},
        {"number": 0, "side": "without", "rollout": 1, "token_ids": [5, 6, 8, 8, 8]},  # ends before the 8
        {"number": 1, "side": "without", "rollout": 0, "token_ids": [5]},
    ]
    answers = {"a": {"request_id": "a", "answer": "42", "token_ids": [3, 4, 5, 9], "text": "another"}}
    tokens = table(token(), token(rejected_ends=True, rejected=31, hidden=[1.0, 31.0]), token())
    labels = labelled(tokens, iter(sampled), {"a": ROWS[0]}, answers, even, SpellingTokenizer(), 0.5)
    names = ("rejected", "utility_with", "utility_without", "rollouts_with", "rollouts_without", "pivot")
    assert [tuple(row[name] for name in names) for row in labels.to_pylist()] == [
        (30, 0.5, 1.0, 2, 2, True),
        (31, 1.0, 0.0, 1, 1, False),  # 3 31; and the third token has no answers
    ]
    assert labels["held_out"].to_pylist() == [is_held_out("a", 0.5)] * 2
    features, pivots = features_of(labels)
    assert pivots.tolist() == [True, False]
    assert features.values.tolist() == [[1, 30, 0.5, 0.25], [1, 31, 0.5, 0.25]]


def test_an_answer_that_is_worth_less_than_nothing_is_refused() -> None:
    message = "an answer of row a worth -1.5: .* return numbers of at least 0"
    with pytest.raises(InputError, match=message):
        worth({"request_id": "a"}, [6], "", lambda row: -1.5 if row["token_ids"][-1] == 6 else 0.0)


def test_features_are_those_of_rows_that_a_filter_has_left() -> None:
    tokens = table(token(), token(rejected=31, hidden=[1.0, 31.0]))
    pieces = pa.concat_tables([tokens, tokens]).append_column("pivot", pa.array([True, False, False, True]))
    features, pivots = features_of(pieces.filter(pa.array([False, True, True, True])))
    assert features.hidden.dtype == torch.float32
    assert features.hidden.tolist() == [[1, 31], [1, 30], [1, 31]]
    assert pivots.tolist() == [False, False, True]


def test_a_share_of_the_prompts_is_held_out() -> None:
    names = [f"row {number}" for number in range(2000)]
    assert sum(is_held_out(name, 0.25) for name in names) == pytest.approx(500, abs=80)
    assert {name for name in names if is_held_out(name, 0.1)} < {name for name in names if is_held_out(name, 0.4)}


def test_a_row_is_decoded_again_with_its_own_settings(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "temperature": 0.5, "max_tokens": 9})
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    own = {"sampling": '{"temperature": 0.9, "logprobs": 3}'}
    sampling = SamplingParams(temperature=0.2, max_new_tokens=7, logprobs=1)
    run = {"config": GenerateConfig("in", "out", sampling=sampling).as_dict()}
    for number, (columns, temperature, most) in enumerate(((line, 0.5, 9), (own, 0.9, 7), ({}, 0.2, 7))):
        row = {"id": "a", "accepted": [0], "marks": {"seed": 11, **columns}}
        (found,) = rows_to_repeat(write_output(tmp_path / str(number), [[row]], []), run)
        asked = found.request.sampling
        assert (asked.temperature, asked.max_new_tokens, asked.seed, asked.logprobs) == (temperature, most, 11, None)
        assert list(found.request.prompt_ids) == [20, 21]

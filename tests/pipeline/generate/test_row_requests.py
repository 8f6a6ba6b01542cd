"""Rows become requests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import SamplingParams
from pipeline.errors import RowError
from pipeline.generate.generate_config import ReadingConfig
from pipeline.generate.row_requests import PromptSettings, make_requests, row_messages, row_sampling, row_seed
from pipeline.generate.staged_input import PROBLEM_TYPE
from pipeline.io.reading import PromptSource

DEFAULTS = SamplingParams(temperature=0.7, seed=3)


def requests(model: Path, rows: list[dict[str, Any]], source: PromptSource, **reading: Any) -> list[dict[str, Any]]:
    table = pa.table(
        {
            "request_id": pa.array([str(index) for index in range(len(rows))]),
            "row": pa.array(rows),
            "problem": pa.nulls(len(rows), PROBLEM_TYPE),
        }
    )
    settings = PromptSettings(str(model), False, source, ReadingConfig(**reading), DEFAULTS)
    made: list[dict[str, Any]] = make_requests(table, settings).to_pylist()
    return made


def test_a_row_seed_is_a_known_hash_of_run_and_row() -> None:
    # A change of these numbers would change every sampled token of every dataset.
    assert row_seed(0, "a.jsonl:1") == 3135495352334882320
    assert row_seed(1, "a.jsonl:1") == 6993715813181222946
    assert row_seed(0, "a.jsonl:2") == 1465886733691829453


@given(st.integers(0, 2**64), st.text())
def test_row_seeds_fit_a_column(seed: int, request_id: str) -> None:
    assert 0 <= row_seed(seed, request_id) < 2**63


@pytest.mark.parametrize(
    "own", [{"top_k": 5, "stop": ["x"], "seed": None}, '{"top_k": 5, "stop": ["x"]}'], ids=["object", "text"]
)
def test_a_row_changes_the_run_settings(own: Any) -> None:
    sampling = row_sampling(DEFAULTS, "r", {"sampling": own}, "sampling")
    expected = dataclasses.replace(DEFAULTS, top_k=5, stop=("x",), seed=row_seed(3, "r"))
    assert sampling == expected


@pytest.mark.parametrize(
    ("row", "seed"),
    [
        ({}, row_seed(3, "r")),
        ({"seed": 11}, 11),
        ({"seed": "11"}, 11),
        ({"seed": ""}, row_seed(3, "r")),
        ({"sampling": {"seed": 12}}, 12),
        ({"seed": 11, "sampling": {"seed": 12}}, 12),
        ({"seed": None, "sampling": ""}, row_seed(3, "r")),
    ],
)
def test_where_a_seed_comes_from(row: dict[str, Any], seed: int) -> None:
    assert row_sampling(DEFAULTS, "r", row, "sampling").seed == seed


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sampling": 5}, "must be an object"),
        ({"sampling": "[1]"}, "must be an object"),
        ({"sampling": "{"}, "is not JSON"),
        ({"sampling": {"heat": 1}}, "unknown sampling settings heat"),
        ({"sampling": {"temperature": -1}}, "temperature must be at least 0"),
        ({"sampling": '{"temperature": NaN}'}, "temperature must be a finite number"),
        ({"sampling": {"temperature": "hot"}}, "temperature must be a finite number"),
        ({"sampling": {"max_new_tokens": 1.5}}, "max_new_tokens must be an integer"),
        ({"sampling": {"stop": "x"}}, "stop must be a list"),
        ({"sampling": {"stop": 5}}, "not iterable"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"seed": "many"}, "seed must be an integer"),
        ({"seed": 2**63}, "less than 2**63"),
    ],
)
def test_bad_settings_of_a_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as caught:
        row_sampling(DEFAULTS, "r", row, "sampling")
    assert caught.value.kind == "BadSampling"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no messages"),
        ([], "no messages"),
        ("hello", "is not JSON"),
        ('{"role": "user"}', "must be a list"),
        (["hello"], "must be a list"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": 5}], "message 1 has no content"),
    ],
)
def test_bad_messages(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        row_messages(value, "messages")


def test_messages_as_lists_and_as_text_are_the_same() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    assert row_messages(messages, "m") == row_messages(json.dumps(messages), "m") == [{"role": "user", "content": "x"}]


def test_prompts_go_through_the_template_where_there_is_one(model: Path, tmp_path: Path) -> None:
    source = PromptSource("prompt")
    rows = [{"prompt": "how many"}]
    bare = requests(model, rows, source, chat=False)[0]["prompt_ids"]
    chat = requests(model, rows, source)[0]["prompt_ids"]
    user, end, assistant = 2, 0, 3
    assert chat == [user, *bare, end, assistant]
    messages = [{"messages": [{"role": "user", "content": "how many"}]}]
    assert requests(model, messages, PromptSource("messages", "messages"))[0]["prompt_ids"] == chat


def test_rows_that_cannot_be_requests_keep_their_place(model: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": '[{"role": "user", "content": "a"}]', "sampling": None},
        {"messages": '[{"role": "forbidden", "content": "a"}]', "sampling": None},
        {"messages": '[{"role": "user", "content": "a"}]', "sampling": '{"top_k": -1}'},
        {"messages": "", "sampling": None},
    ]
    made = requests(model, rows, PromptSource("messages", "messages"))
    assert [row["request_id"] for row in made] == ["0", "1", "2", "3"]
    assert [row["problem"] and row["problem"]["type"] for row in made] == [
        None,
        "BadPrompt",
        "BadSampling",
        "BadPrompt",
    ]
    assert [row["prompt_ids"] is None for row in made] == [False, True, True, True]
    assert "no such role" in made[1]["problem"]["message"]

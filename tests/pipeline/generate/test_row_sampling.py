"""A row's own settings, and where its seed comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import SamplingParams, hashed_seed
from pipeline.generate.row_requests import row_sampling

DEFAULTS = SamplingParams(temperature=0.7, seed=3)


def test_a_row_seed_is_a_known_hash_of_run_and_row() -> None:
    # A change of these numbers would change every sampled token of every dataset.
    assert hashed_seed(0, "a.jsonl:1") == 3135495352334882320
    assert hashed_seed(1, "a.jsonl:1") == 6993715813181222946
    assert hashed_seed(0, "a.jsonl:2") == 1465886733691829453


@given(st.integers(0, 2**64), st.text())
def test_row_seeds_fit_a_column(seed: int, request_id: str) -> None:
    assert 0 <= hashed_seed(seed, request_id) < 2**63


@pytest.mark.parametrize(
    "own", [{"top_k": 5, "stop": ["x"], "seed": None}, '{"top_k": 5, "stop": ["x"]}'], ids=["object", "text"]
)
def test_a_row_changes_the_run_settings(own: Any) -> None:
    sampling = row_sampling(DEFAULTS, "r", {"sampling": own}, "sampling")
    expected = dataclasses.replace(DEFAULTS, top_k=5, stop=("x",), seed=hashed_seed(3, "r"))
    assert sampling == expected


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_an_integer_that_only_a_float_holds_is_one(name: str) -> None:
    """As a tensor's value it would end the engine's process."""
    value = getattr(row_sampling(DEFAULTS, "r", {"sampling": {name: 10**300}}, "sampling"), name)
    assert isinstance(value, float)
    assert value == 1e300


@pytest.mark.parametrize(
    ("row", "seed"),
    [
        ({}, hashed_seed(3, "r")),
        ({"seed": 11}, 11),
        ({"seed": "11"}, 11),
        ({"seed": ""}, hashed_seed(3, "r")),
        ({"sampling": {"seed": 12}}, 12),
        ({"seed": 11, "sampling": {"seed": 12}}, 12),
        ({"seed": None, "sampling": ""}, hashed_seed(3, "r")),
    ],
)
def test_where_a_seed_comes_from(row: dict[str, Any], seed: int) -> None:
    assert row_sampling(DEFAULTS, "r", row, "sampling").seed == seed

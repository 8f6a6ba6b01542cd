"""The planner's choice is that of enumerating all stacks."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.stacks import Levels, acceptance_of, block_of, compare_stacks, expected_tokens


def per_token(levels: Levels, stack: tuple[int, ...]) -> float:
    """Seconds for each token of a stack, written out."""
    block, seconds = levels.blocks[stack[0]], levels.drafting[stack[0]]
    for below, above in zip(stack, (*stack[1:], -1), strict=True):
        alpha = levels.acceptance[below][above]
        block = (1 - alpha ** (block + 1)) / (1 - alpha)
        seconds += levels.pricing[below][above]
    return seconds / block


@st.composite
def measured(draw: Any) -> Levels:
    count = draw(st.integers(1, 6))
    share, time = st.floats(0.0, 0.98), st.floats(0.01, 1.0)
    is_model = [draw(st.booleans()) for _ in range(count)]
    return Levels(
        names=[str(place) for place in range(count)],
        blocks=[float(draw(st.integers(1, 16))) for _ in range(count)],
        drafting=[draw(time) for _ in range(count)],
        acceptance=[[draw(share) for _ in range(count + 1)] for _ in range(count)],
        pricing=[[*(draw(time) if model else math.inf for model in is_model), draw(time)] for _ in range(count)],
        plain=draw(time),
    )


@given(measured())
def test_the_best_of_all_stacks_is_found(levels: Levels) -> None:
    count = len(levels.names)
    every = {
        stack: per_token(levels, stack) for size in range(1, count + 1) for stack in combinations(range(count), size)
    }
    best = min([levels.plain, *every.values()])
    found = compare_stacks(levels)
    assert found[0].per_token == pytest.approx(best)
    assert [one.per_token for one in found] == sorted(one.per_token for one in found)
    for one in found:
        if one.levels:
            assert one.per_token == pytest.approx(every[tuple(map(int, one.levels))])


def test_one_drafter_is_plain_speculation() -> None:
    levels = Levels(["a"], [4.0], [0.1], [[0.0, 0.5]], [[math.inf, 1.0]], 0.9)
    speculation, plain = compare_stacks(levels)
    assert speculation.levels == ("a",)
    assert speculation.tokens == pytest.approx(1.9375)  # 1 + 1/2 + 1/4 + 1/8 + 1/16
    assert speculation.per_token == pytest.approx(1.1 / 1.9375)
    assert (plain.levels, plain.per_token) == ((), 0.9)


def test_drafts_that_are_not_accepted_are_not_worth_their_time() -> None:
    levels = Levels(["a"], [4.0], [0.1], [[0.0, 0.05]], [[math.inf, 1.0]], 0.9)
    assert compare_stacks(levels)[0].levels == ()


@given(st.floats(0.0, 0.999), st.floats(0.5, 16.0))
def test_acceptance_follows_from_tokens(acceptance: float, block: float) -> None:
    assert expected_tokens(acceptance_of(expected_tokens(acceptance, block), block), block) == pytest.approx(
        expected_tokens(acceptance, block)
    )


@given(st.floats(0.01, 0.99), st.floats(0.0, 8.0))
def test_the_block_follows_from_tokens(acceptance: float, block: float) -> None:
    tokens = expected_tokens(acceptance, block)
    assert expected_tokens(acceptance, block_of(tokens, acceptance, 20.0)) == pytest.approx(tokens)
    assert block_of(1.0 / (1.0 - acceptance) + 1.0, acceptance, 20.0) == 20.0  # more than any block gives

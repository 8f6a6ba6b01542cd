"""Marks on some parameters of a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Return the parameters `every`, all of them marked slow but those in `fast`."""
    return slow_but_tuples([(one,) for one in fast], [(one,) for one in every])


def slow_but_tuples(fast: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the same for tuples, of several parameters each."""
    chosen, values = list(fast), list(every)
    assert all(one in values for one in chosen)
    return [pytest.param(*one, marks=() if one in chosen else pytest.mark.slow) for one in values]


def pairwise(fast: int, *factors: Sequence[Any]) -> list[Any]:
    """Return cases of a value of each factor in which every value meets each of every other factor at least once.

    The first `fast` of them go through the values of the first factor; the others are marked slow.
    """
    places, sizes = range(len(factors)), [len(values) for values in factors]
    left = {
        (one, first, other, second): None  # in this order, which a set would not keep
        for one, other in combinations(places, 2)
        for first in range(sizes[one])
        for second in range(sizes[other])
    }
    cases: list[dict[int, int]] = []
    while left or len(cases) < fast:
        turn = len(cases)
        if turn < fast:
            case = {0: turn % sizes[0]}
        else:
            one, first, other, second = next(iter(left))
            case = {one: first, other: second}
        for place in places:
            if place not in case:  # what meets most that it has not met, and of such values the next in turn
                values = [(turn + turn // sizes[place] + step) % sizes[place] for step in range(sizes[place])]
                case[place] = max(values, key=lambda value: len(_met({**case, place: value}) & left.keys()))
        for pair in _met(case):
            left.pop(pair, None)
        cases.append(case)
    chosen = [tuple(factors[place][case[place]] for place in places) for case in cases]
    return [pytest.param(*one, marks=() if turn < fast else pytest.mark.slow) for turn, one in enumerate(chosen)]


def _met(case: dict[int, int]) -> set[tuple[int, int, int, int]]:
    return {(one, case[one], other, case[other]) for one, other in combinations(sorted(case), 2)}

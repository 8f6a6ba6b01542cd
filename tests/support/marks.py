"""Marks on some parameters of a test."""

from __future__ import annotations

from collections.abc import Iterable
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

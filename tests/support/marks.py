"""Marks on some parameters of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Return the parameters `every`, all of them marked slow but those in `fast`."""
    chosen = list(fast)
    return [one if one in chosen else pytest.param(one, marks=pytest.mark.slow) for one in every]

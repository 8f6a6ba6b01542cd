"""Sequences that enter and move in the slots of a drafter without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafter.drafters.contract import Drafter


def enter(drafter: Drafter, slot: int, text: Sequence[int] = ()) -> None:
    """Put a text into a slot; without one, the tokens that a context has count."""
    for state in drafter.slots:
        state.enter(slot, np.array(text, dtype=np.int64))


def move(drafter: Drafter, source: int, target: int) -> None:
    for state in drafter.slots:
        state.move(source, target)

"""Interface of budgets, which decide how many draft tokens a step has, and the fixed budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from drafter.drafters.contract import Ask
from drafter.statistics import BatchChoice

Floats = npt.NDArray[np.float64]


SHADOW_ROWS = 4
"""Most rows of a shadow draft. A few tell enough, and more cost more."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the drafter's prefill (once per text), of drafting, and of the rest of a step."""

    reading: float
    drafting: float
    rest: float

    @property
    def all(self) -> float:
        return self.reading + self.drafting + self.rest


@dataclass(frozen=True)
class ScoredTrees:
    """Trees of B rows, asked for with k draft tokens, of which the text has shown what it contains.

    They were verified, or are a shadow draft, which was compared with the tokens that came.
    """

    member: int  # index of the drafter's `members` that drafted them
    drafted: npt.NDArray[np.int64]  # `[B]` draft tokens that each tree has, up to k
    accepted: npt.NDArray[np.bool_]  # `[B, k]` draft tokens, by falling probability, that are in the text


@dataclass(frozen=True)
class StepObservation:
    """A finished step of B rows, for a budget to learn from."""

    rows: int
    ask: Ask
    tokens: int  # new tokens of all rows
    trees: ScoredTrees | None = None  # the verified ones; None for a plain step
    seconds: StepSeconds | None = None  # None where the host does not know
    shadow: StepSeconds | None = None  # of the shadow draft that was asked for, beside `seconds`
    shadows: tuple[ScoredTrees, ...] = ()  # of shadow drafts, of this step or earlier ones, whose text has come


class Budget(Protocol):
    """Decides what speculation may cost. It learns only in `observe` and `renewed`."""

    def plan(self, rows: int) -> Ask:
        """Return the draft tokens to ask for in a step of so many rows; none for plain decoding."""

    def observe(self, step: StepObservation) -> None:
        """Learn from a step. Comes after every step, drafted or not."""

    def choices(self) -> tuple[BatchChoice, ...]:
        """Return the choices by batch size with their reasons; empty where nothing is chosen. Thread-safe."""

    def renewed(self, member: int) -> None:
        """Forget what trees of a member were worth: its weights were replaced."""


class FixedBudget:
    """Always drafts and verifies the same number of draft tokens per row."""

    def __init__(self, nodes: int) -> None:
        # Were all nodes alike, each would be worth this share of a step: what is less probable hardly comes true.
        self._ask = Ask(nodes, 1 / (nodes + 1), fixed=True)

    def plan(self, rows: int) -> Ask:
        return self._ask

    def observe(self, step: StepObservation) -> None:
        """Learn nothing."""

    def choices(self) -> tuple[BatchChoice, ...]:
        return ()

    def renewed(self, member: int) -> None:
        """Draft as before."""

"""Interface of budgets, which decide how many draft tokens a step has, and the fixed budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from drafter.drafters.contract import Ask
from drafter.statistics import BatchChoice

Floats = npt.NDArray[np.float64]
Choosing = Literal["greedy", "drawn", "filtered"]
"""Choice of tokens: greedy; sampled, or after penalties or biases; or with top-k or top-p, too."""


@dataclass(frozen=True)
class StepLoad:
    """Factors of a step's time beside its draft tokens."""

    rows: int
    length: float = 0.0  # committed tokens of a row, on average; 0 for at most those that steps were timed with
    choosing: Choosing = "greedy"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the drafter's prefill (once per text), of drafting, and of the rest of a step."""

    reading: float
    drafting: float
    rest: float


@dataclass(frozen=True)
class StepObservation:
    """A finished step of B rows, for a budget to learn from."""

    load: StepLoad
    asked: int  # draft tokens that were asked for, per row; 0 for a plain step
    promised: Floats  # `[B, asked]` log prefix probabilities of the drafted nodes, falling; -inf in padding
    log_probs: Floats  # `[B, N]` those of the nodes that were verified
    accepted: npt.NDArray[np.bool_]  # `[B, N]` nodes that became output
    seconds: StepSeconds | None = None  # None where the host does not know
    member: int = 0
    emitted: int | None = None  # new tokens of all rows; None if no row ended

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.rows + int(self.accepted.sum()) if self.emitted is None else self.emitted

    @property
    def rows(self) -> int:
        return self.load.rows

    @property
    def verified(self) -> npt.NDArray[np.int64]:
        """`[B]` draft tokens that were verified."""
        found: npt.NDArray[np.int64] = (self.log_probs > -np.inf).sum(1)
        return found


class Budget(Protocol):
    """Decides what speculation may cost. It learns only in `observe` and `renewed`."""

    def plan(self, load: StepLoad) -> Ask:
        """Return the draft tokens to ask for in a step; none for plain decoding."""

    def observe(self, step: StepObservation) -> None:
        """Learn from a step. Comes after every step, drafted or not."""

    def choices(self) -> tuple[BatchChoice, ...]:
        """Return the choices by batch size with their reasons; empty where nothing is chosen. Thread-safe."""

    def renewed(self, member: int) -> None:
        """Expect another acceptance from a member, whose weights were replaced."""


class FixedBudget:
    """Always drafts and verifies the same number of draft tokens per row."""

    def __init__(self, nodes: int) -> None:
        # Were all nodes alike, each would be worth this share of a step: what is less probable hardly comes true.
        self._ask = Ask(nodes, 1 / (nodes + 1))

    def plan(self, load: StepLoad) -> Ask:
        return self._ask

    def observe(self, step: StepObservation) -> None:
        """Learn nothing."""

    def choices(self) -> tuple[BatchChoice, ...]:
        return ()

    def renewed(self, member: int) -> None:
        """Draft as before."""

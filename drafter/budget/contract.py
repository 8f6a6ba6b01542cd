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
    """Factors of a step's time beside its draft tokens.

    Args:
        length: Committed tokens of a row, on average; 0 stands for at most those that steps were timed with.
    """

    rows: int
    length: float = 0.0
    choosing: Choosing = "greedy"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the drafter's prefill (once per text), of drafting, and of the rest of a step."""

    reading: float
    drafting: float
    rest: float


@dataclass(frozen=True)
class StepObservation:
    """A finished step of B rows, for a budget to learn from.

    Args:
        asked: Draft tokens that were asked for, per row; 0 for a plain step.
        promised: `[B, asked]` log prefix probabilities of the drafted nodes, falling; -inf in padding.
        log_probs: `[B, N]` those of the nodes that were verified; -inf in padding.
        accepted: `[B, N]` bool: nodes that became output.
        seconds: None where the host does not know.
        member: `Ask.member`.
        emitted: New tokens of all rows; None where no row ended, so that each has its accepted ones and one more.
    """

    load: StepLoad
    asked: int
    promised: Floats
    log_probs: Floats
    accepted: npt.NDArray[np.bool_]
    seconds: StepSeconds | None = None
    member: int = 0
    emitted: int | None = None

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

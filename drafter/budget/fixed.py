"""A fixed number of draft nodes, for comparisons and for who knows what pays."""

from __future__ import annotations

import numpy as np

from drafter.budget.contract import Counts, Floats, StepLoad, StepObservation
from drafter.drafters.contract import Ask
from drafter.statistics import BatchChoice


class FixedBudget:
    """Always drafts and verifies the same number of nodes.

    Args:
        nodes: Draft nodes of each row.
    """

    def __init__(self, nodes: int) -> None:
        # Were all nodes alike, each would be worth this share of a step: what is less probable hardly comes true.
        self._ask = Ask(nodes, 1 / (nodes + 1))

    def plan(self, load: StepLoad) -> Ask:
        """The fixed number, whatever the load."""
        return self._ask

    def trim(self, log_probs: Floats) -> Counts:
        """The fixed number, whatever the trees."""
        return np.full(len(log_probs), min(self._ask.nodes, log_probs.shape[1]))

    def observe(self, step: StepObservation) -> None:
        """Learn nothing."""

    def choices(self) -> tuple[BatchChoice, ...]:
        """Nothing is chosen."""
        return ()

    def renewed(self, member: int) -> None:
        """Draft as before."""

"""Latencies that are given, for engines whose budget adapts: what a test finds must not depend on what else runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import StepObservation, StepSeconds
from drafter.budget.latency_table import NODE_COUNTS, LatencyTable, batch_sizes
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import step_costs

_DRAFT = 0.02
"""Seconds of drafting; a plain step of a row takes one."""


def given_table(step: DeviceStep, queue: QueuedStep | None = None, drafter: str | None = None) -> LatencyTable:
    """Stands for `step_costs`: draft tokens cost little, so that whatever comes true now and then pays."""
    most, batches = step.state.drafter.spec.max_nodes, batch_sizes(step.state.slots)
    nodes = tuple(sorted({count for count in NODE_COUNTS if count < most} | {most}))
    rows = np.array(batches, dtype=np.float64)
    verify = (1 + 0.1 * rows[:, None]) * (1 + 0.01 * np.array(nodes))
    draft = np.broadcast_to(np.where(np.array(nodes) > 0, _DRAFT, 0.0), (len(batches), len(nodes)))
    return LatencyTable(rows, nodes, verify, np.stack([draft] * len(step.choices)))


class TimelessBudget(AdaptiveBudget):
    """Takes steps to last as long as the table says."""

    def observe(self, step: StepObservation) -> None:
        shadow = None if step.shadow is None else StepSeconds(0.0, _DRAFT, 0.0)
        super().observe(replace(step, seconds=None, shadow=shadow))


def give_latencies(patch: pytest.MonkeyPatch) -> None:
    """Have the engines of this process measure nothing."""
    patch.setattr("drafter.engine.warm_up.step_costs", given_table)
    patch.setattr("drafter.engine.warm_up.AdaptiveBudget", TimelessBudget)


def measure_latencies(patch: pytest.MonkeyPatch) -> None:
    """Have them do what they do outside of tests."""
    patch.setattr("drafter.engine.warm_up.step_costs", step_costs)
    patch.setattr("drafter.engine.warm_up.AdaptiveBudget", AdaptiveBudget)

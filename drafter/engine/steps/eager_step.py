"""A step whose stages the host follows one by one: it looks at the tree before it decides how much of it to verify."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter import devices
from drafter.budget.contract import Budget, StepLoad, StepSeconds
from drafter.drafters.contract import DraftContext
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.outcome import StepOutcome
from drafter.stage_times import StageTimes


@dataclass(frozen=True)
class StepRun:
    """A step that has been run or queued.

    Args:
        outcome: On the device.
        load: What its time follows from.
        asked: Draft nodes that were asked for, a row.
        verified: Draft nodes of the widest row that was verified.
        promised: `[B, asked]` log prefix probabilities of all drafted nodes, where not all of them are verified.
        seconds: Where the time went; None where the host does not know.
        member: Which of the drafter's members drafted.
    """

    outcome: StepOutcome
    load: StepLoad
    asked: int
    verified: int
    promised: npt.NDArray[np.float64] | None = None
    seconds: StepSeconds | None = None
    member: int = 0


class EagerStep:
    """Runs steps stage by stage.

    Args:
        device_step: The stages.
        budget: Decides how much to draft and how much of that to verify.
        times: Where each stage's time is noted.
        admit: Lets sequences enter that have come since. Half of a step is over when its trees are there, and who comes
            then need not wait for the other half.
    """

    lag = 0

    def __init__(self, device_step: DeviceStep, budget: Budget, times: StageTimes, admit: Callable[[], object]) -> None:
        self._step, self._budget, self._times, self._admit = device_step, budget, times, admit
        self._timed = not devices.is_asynchronous(device_step.base.device)

    def run(self, context: DraftContext, plain: list[bool]) -> StepRun:
        """Decode one step of the context's rows; nothing is verified of the trees of `plain` ones."""
        rows, started, reading, drafting = len(context.host_lengths), time.perf_counter(), 0.0, 0.0
        load = self._step.state.load(context.host_lengths)
        ask = self._budget.plan(load)
        self._times.mark("host")
        promised = None
        if ask.nodes:
            begun = time.perf_counter()
            self._step.state.drafter.select(ask.member)
            self._step.state.drafter.prepare(context)
            reading = time.perf_counter() - begun
            self._times.mark("draft")
        tree = self._step.draft(context, ask)
        if ask.nodes:
            promised = tree.log_probs[:, 1:].cpu().numpy().astype(np.float64)
            self._times.mark("tree")
            drafted = (promised > -np.inf).sum(1)  # padding would be verified, too
            sizes = np.where(plain, 0, np.minimum(self._budget.trim(promised), drafted))
            tree = tree.trimmed(1 + torch.from_numpy(sizes))
            self._times.mark("host")
            drafting = time.perf_counter() - started - reading
            self._admit()
        started = time.perf_counter()
        verified = self._step.verify(tree, context.longest + tree.size)
        self._times.mark("verify")
        outcome = self._step.accept(verified, slice(0, rows))
        self._times.mark("commit")
        seconds = StepSeconds(reading, drafting, time.perf_counter() - started) if self._timed else None
        return StepRun(outcome, load, ask.nodes, tree.size - 1, promised, seconds, ask.member)

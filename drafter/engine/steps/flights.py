"""Steps that are queued, or done, and whose outcome the host has not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter.budget.contract import StepLoad, StepSeconds
from drafter.engine.sequences.sequence import Sequence
from drafter.engine.steps.outcome import StepOutcome


@dataclass(frozen=True)
class Flight:
    """One such step.

    Args:
        sequences: Those of its B rows.
        stays: `Sequence.stay` of each when the step began.
        load: What its time follows from.
        asked: Draft nodes that were asked for, a row.
        depth: Draft tokens that a row may get at most.
        outcome: On the host, or on its way there.
        wanted: Row → of how many of the most probable tokens it wants log-probabilities.
        promised: `[B, asked]` log prefix probabilities of all drafted nodes, where not all of them are verified.
        seconds: Where the time went, where the host knows.
        planned: Whether the budget planned the step; not where it came with a prompt's forward.
        landed: Happens when the outcome is there; None where it is.
        member: Which of the drafter's members drafted.
        version: `Drafter.version` of the step.
    """

    sequences: list[Sequence]
    stays: list[int]
    load: StepLoad
    asked: int
    depth: int
    outcome: StepOutcome
    wanted: dict[int, int]
    promised: npt.NDArray[np.float64] | None = None
    seconds: StepSeconds | None = None
    planned: bool = True
    landed: torch.cuda.Event | None = None
    member: int = 0
    version: int | None = None

    @property
    def alive(self) -> list[int]:
        """Rows whose sequence is still in the slot of the step; others have ended, or left it, and it has gone on."""
        return [
            row
            for row, (sequence, stay) in enumerate(zip(self.sequences, self.stays, strict=True))
            if not sequence.ended and sequence.stay == stay
        ]


class Flights:
    """The flights, oldest first.

    Args:
        device: Where steps are done.
        lag: Steps that stay under way on the device while the host reads an older one.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self._device, self.lag = device, lag
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def ahead(self) -> int:
        """Tokens that a sequence may have more than the host knows of."""
        return sum(flight.depth + 1 for flight in self._flights)

    def send(self, outcome: StepOutcome, rows: int) -> tuple[StepOutcome, torch.cuda.Event | None]:
        """Send an outcome's first `rows` rows to the host without waiting; return its arrival too."""
        if self._device.type != "cuda":
            return outcome, None
        outcome = outcome.to_host(rows)
        landed = torch.cuda.Event(blocking=True)
        landed.record(torch.cuda.current_stream(self._device))
        return outcome, landed

    def add(self, flight: Flight) -> None:
        """Take note of a step that has been queued."""
        self._flights.append(flight)

    def land(self, keep: int) -> Iterator[Flight]:
        """Wait for all flights but the newest `keep` ones, oldest first, and hand them out."""
        while len(self._flights) > keep:
            flight = self._flights.pop(0)
            if flight.landed is not None:
                flight.landed.synchronize()
            yield flight

    def clear(self) -> None:
        """Forget all flights."""
        self._flights = []

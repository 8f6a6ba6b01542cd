"""The board: one small actor that engines report to and the driver fetches from.

The actor keeps nothing that the driver has fetched. It may die, and Ray starts another.
"""

from __future__ import annotations

import time
import uuid
from typing import Generic, TypeVar

from pipeline.progress.reports import EngineReport, Mail, PartReport

Report = TypeVar("Report")


class _Box(Generic[Report]):
    """The newest report of each sender, until it is fetched."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, Report]] = {}

    def put(self, sender: str, number: int, report: Report) -> None:
        self._reports[sender] = (number, report)

    def after(self, number: int) -> dict[str, Report]:
        """Return the reports after `number`; those up to it have arrived and are forgotten."""
        self._reports = {sender: one for sender, one in self._reports.items() if one[0] > number}
        return {sender: report for sender, (_, report) in self._reports.items()}


class ProgressBoard:
    """Takes the reports of engines and keeps them for the driver; a Ray actor, but nothing in it needs Ray."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._number = 0
        self._parts: _Box[PartReport] = _Box()
        self._engines: _Box[EngineReport] = _Box()
        self._first: float | None = None
        self._last: float | None = None
        self._stage: str | None = None
        self._failure: str | None = None
        self._crash: str | None = None

    def starting(self, stage: str) -> None:
        """Note what an engine does before it can generate."""
        self._stage = stage

    def failed(self, message: str) -> None:
        """Note that an engine could not be loaded."""
        self._failure = message

    def crashed(self, message: str) -> None:
        """Note that an engine's process is about to end."""
        self._crash = message

    def engine(self, name: str, report: EngineReport) -> None:
        """Note the state of an engine; its name is new for each process."""
        self._number += 1
        self._engines.put(name, self._number, report)
        self._first = self._first or time.time()

    def update(self, part: str, report: PartReport) -> None:
        """Note how much of a part is done."""
        self._number += 1
        self._parts.put(part, self._number, report)
        self._last = time.time()

    def mail(self, life: str, number: int) -> Mail:
        """Return the reports after `number`, or all of them if the board that had that number was in another `life`."""
        arrived = number if life == self._life else 0
        return Mail(
            self._life,
            self._number,
            self._parts.after(arrived),
            self._engines.after(arrived),
            self._first,
            self._last,
            self._stage,
            self._failure,
            self._crash,
        )

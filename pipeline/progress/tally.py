"""The tally: what the board was told, added up to how far the job is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType

from drafter.statistics import merged_choices, per_second
from pipeline.progress.job_progress import Progress
from pipeline.progress.reports import EngineReport, Mail, PartReport

_SILENT_SECONDS = 20.0
"""An engine that has not reported for this long has ended."""
_WINDOW_SECONDS = 600.0
"""The rate by which the rest is estimated is of this long."""
_SAMPLE_SECONDS = 1.0


@dataclass
class Tally:
    """Adds up what the board was told. If reports are lost with a board it counts too little, never twice.

    Args:
        total: Rows of the input.
        before: Rows of earlier submissions.
        errors_before: Errors among them.
        kept: Those of them that are in unfinished parts; engines will report them again with their parts.
    """

    total: int
    before: int
    errors_before: int
    kept: InitVar[Mapping[str, PartReport]] = field(default=MappingProxyType({}))
    life: str = ""
    number: int = 0
    _parts: dict[str, PartReport] = field(default_factory=dict)
    _sum: PartReport = field(default_factory=PartReport)
    _engines: dict[str, tuple[float, EngineReport]] = field(default_factory=dict)
    _first: float | None = None
    _last: float = 0.0
    _stage: str | None = None
    _failure: str | None = None
    _crash: str | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self, kept: Mapping[str, PartReport]) -> None:
        self._parts.update(kept)  # and not to the sum: they took this submission no time

    def take(self, mail: Mail, now: float) -> None:
        """Enter the board's mail, at `now` in seconds since 1970."""
        self.life, self.number = mail.life, mail.number
        for name, report in mail.parts.items():
            self._sum = self._sum.plus(report).minus(self._parts.get(name, PartReport()))
            self._parts[name] = report
        self._engines.update({name: (now, report) for name, report in mail.engines.items()})
        if self._first is None:
            self._first = mail.first
        self._last = max(self._last, mail.last or 0.0)
        self._stage = mail.stage or self._stage
        self._failure = mail.failure or self._failure
        self._crash = mail.crash or self._crash

    def progress(self, now: float) -> Progress:
        """Return how far the job is at `now`."""
        reports = [report for _, report in self._engines.values()]
        alive = [report for seen, report in self._engines.values() if now - seen < _SILENT_SECONDS]
        return Progress(
            state="starting" if self._first is None else "generating",
            stage=self._stage or "starting the engine's process",
            total=self.total,
            before=self.before,
            errors_before=self.errors_before,
            **vars(self._sum),
            seconds=max(self._last - self._first, 0.0) if self._first is not None else 0.0,
            recent_row_rate=self._recent_row_rate(now),
            engines=len(alive),
            slots=sum(report.slots for report in alive),
            active=sum(report.active for report in alive),
            waiting=sum(report.waiting for report in alive),
            memory_tokens=sum(report.memory_tokens for report in alive),
            memory_bytes=sum(report.memory_bytes for report in alive),
            choices=merged_choices(report.choices for report in reports),
            engine_seconds=sum(report.seconds for report in reports),
            device=", ".join(dict.fromkeys(report.device for report in reports)) or None,
            facts=reports[0].facts if reports else None,
            failure=self._failure,
            crash=self._crash,
        )

    def _recent_row_rate(self, now: float) -> float:
        """Rows a second, over the last ten minutes or since the first engine's report."""
        if self._first is None:
            return 0.0
        if not self._samples:
            self._samples.append((self._first, 0))
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_SECONDS:
            self._samples.popleft()
        then, rows_then = self._samples[0]
        rows = self._sum.rows
        if now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((now, rows))
        # A part that is done again counts from its beginning, so the sum may fall.
        return per_second(max(rows - rows_then, 0), now - then)

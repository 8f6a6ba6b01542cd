"""Progress of a job: its processes report to the board, an actor, and the driver fetches and adds up."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from drafter.statistics import (
    BatchChoice,
    DecodeCounts,
    EngineState,
    Sums,
    mean_acceptance_length,
    merged_choices,
    per_second,
)

BEAT_SECONDS = 2.0  # seconds between an engine's reports


@dataclass(frozen=True)
class PartReport(Sums):
    """Progress of a part."""

    rows: int = 0  # done, errors included
    errors: int = 0
    tokens: int = 0
    steps: int = 0  # decode steps that finished rows took part in


@dataclass(frozen=True)
class EngineFacts:
    """An engine's models and verifier. Saved in `run.json`, as all engines of a job have the same."""

    base_fingerprint: str
    weights: str  # what the target model's are, in words
    verifier: str
    lossless: bool
    verifier_settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineReport:
    """An engine's state; `seconds` since its process began to load the models."""

    seconds: float
    device: str
    facts: EngineFacts
    state: EngineState


LearnerState = Literal["starting", "learning", "ended"]
"""`ended`: by an error or too many restarts."""


@dataclass(frozen=True)
class LearningReport:
    """The state of a job's learner."""

    state: LearnerState = "starting"
    reason: str = "it begins"
    version: int | None = None  # number of the head's newest version; None before the first
    beta: float | None = None  # of the weights measured last, on held-out rows
    published_beta: float | None = None  # of the newest version on the same rows
    discarded: int = 0
    steps: int = 0
    seconds: float = 0.0  # of work
    loss: float | None = None  # of the newest step, in nats; None before the first
    rows: int = 0
    held_out: int = 0
    nbytes: int = 0
    dropped: int = 0

    @property
    def active(self) -> bool:
        return self.state == "learning"


State = Literal["starting", "generating", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Progress:
    """Progress of the job."""

    state: State = "starting"
    total: int | None = None
    before: int = 0  # rows that earlier submissions finished, errors included
    errors_before: int = 0
    rows: int = 0  # that this submission has done, errors included
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # from the first engine's first report to the last row
    recent_row_rate: float = 0.0  # rows per second over the last ten minutes
    engines: int = 0
    slots: int = 0
    active: int = 0
    waiting: int = 0
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()
    engine_tokens: int = 0  # new tokens of all engines, also of rows that failed or were begun again
    engine_seconds: float = 0.0  # lifetimes of all engines, ended ones included
    device: str | None = None
    facts: EngineFacts | None = None
    failure: str | None = None  # why an engine could not load its models, or why the job ended
    crash: str | None = None
    stage: str = "starting"
    learning: LearningReport | None = None

    @property
    def done(self) -> int:
        return self.before + self.rows

    @property
    def failed(self) -> int:
        return self.errors_before + self.errors

    @property
    def tokens_per_second(self) -> float:
        return per_second(self.tokens, self.seconds)

    @property
    def rows_per_second(self) -> float:
        return per_second(self.rows, self.seconds)

    @property
    def acceptance_length(self) -> float:
        return mean_acceptance_length(DecodeCounts(num_output_tokens=self.tokens, num_decode_steps=self.steps))

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds left; None while there is no rate."""
        if self.total is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        return left / self.recent_row_rate if self.recent_row_rate > 0 else None


Kind = Literal["engine", "part", "stage", "failure", "crash", "line", "refusal", "begun", "stop"]


@dataclass(frozen=True)
class Mail:
    """Reports to a board since the driver last asked, by kind and sender."""

    life: str = ""  # the board's process: a new one knows none of the old one's reports
    number: int = 0  # of the newest report
    reports: dict[tuple[Kind, str], Any] = field(default_factory=dict)
    first: dict[Kind, float] = field(default_factory=dict)  # time of the first report, in seconds since 1970
    last: dict[Kind, float] = field(default_factory=dict)  # of the newest


class StatusBoard:
    """Keeps reports for a job's driver until it has them. Run as a Ray actor, but independent of Ray."""

    def __init__(self) -> None:
        self._life, self._number = uuid.uuid4().hex, 0
        self._reports: dict[tuple[Kind, str], tuple[int, Any]] = {}
        self._first: dict[Kind, float] = {}
        self._last: dict[Kind, float] = {}

    def put(self, kind: Kind, report: Any, sender: str | None = None) -> None:
        """Record a report. It replaces the sender's earlier one, so that repeated work never counts twice."""
        self._number += 1
        self._reports[kind, str(self._number) if sender is None else sender] = (self._number, report)
        self._last[kind] = time.time()
        self._first.setdefault(kind, self._last[kind])

    def beat(self, engine: str, report: EngineReport, parts: Mapping[str, PartReport]) -> None:
        """Record an engine's report, and those of its parts with news since its last one."""
        self.put("engine", report, engine)
        for part, progress in parts.items():
            self.put("part", progress, part)

    def mail(self, life: str, number: int) -> Mail:
        """Return the reports after `number`, or all if `number` is from another `life`."""
        arrived = number if life == self._life else 0
        self._reports = {key: one for key, one in self._reports.items() if one[0] > arrived}
        reports = {key: report for key, (_, report) in self._reports.items()}
        return Mail(self._life, self._number, reports, self._first, self._last)


_SILENT_SECONDS = 20.0  # an engine silent for this long counts as ended
_WINDOW_SECONDS = 600.0  # window of the row rate behind the ETA
_SAMPLE_SECONDS = 1.0
_SUMMED = ("slots", "active", "waiting", "memory_tokens", "memory_bytes")


@dataclass
class Tally:
    """Adds up the board's reports. Reports lost with a board are never counted twice, only missed.

    `kept` are rows of earlier submissions in unfinished parts: engines report them again with their parts.
    """

    total: int
    before: int  # rows that earlier submissions finished, errors included
    errors_before: int
    kept: InitVar[Mapping[str, PartReport]] = field(default=MappingProxyType({}))
    mail: Mail = field(default_factory=Mail)
    _parts: dict[str, PartReport] = field(default_factory=dict)
    _sum: PartReport = field(default_factory=PartReport)
    _engines: dict[str, tuple[float, EngineReport]] = field(default_factory=dict)
    _texts: dict[Kind, str] = field(default_factory=dict)
    _first: float | None = None
    _last: float = 0.0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self, kept: Mapping[str, PartReport]) -> None:
        self._parts.update(kept)  # and not to the sum: they took this submission no time

    def take(self, mail: Mail, now: float) -> None:
        self.mail = mail
        for (kind, sender), report in mail.reports.items():
            if kind == "part":
                self._sum = self._sum.plus(report).plus(self._parts.get(sender, PartReport()), -1)
                self._parts[sender] = report
            elif kind == "engine":
                self._engines[sender] = (now, report)
            else:
                self._texts[kind] = report
        if self._first is None:
            self._first = mail.first.get("engine")
        self._last = max(self._last, mail.last.get("part", 0.0))

    def progress(self, now: float) -> Progress:
        reports = [report for _, report in self._engines.values()]
        alive = [report.state for seen, report in self._engines.values() if now - seen < _SILENT_SECONDS]
        return Progress(
            state="starting" if self._first is None else "generating",
            stage=self._texts.get("stage", "starting the engine's process"),
            total=self.total,
            before=self.before,
            errors_before=self.errors_before,
            **vars(self._sum),
            seconds=max(self._last - self._first, 0.0) if self._first is not None else 0.0,
            recent_row_rate=self._recent_row_rate(now),
            engines=len(alive),
            **{name: sum(getattr(state, name) for state in alive) for name in _SUMMED},
            choices=merged_choices(report.state.choices for report in reports),
            engine_tokens=sum(report.state.output_tokens for report in reports),
            engine_seconds=sum(report.seconds for report in reports),
            device=", ".join(dict.fromkeys(report.device for report in reports)) or None,
            facts=reports[0].facts if reports else None,
            failure=self._texts.get("failure"),
            crash=self._texts.get("crash"),
        )

    def _recent_row_rate(self, now: float) -> float:
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

"""Progress of a job. Engines report to the board, an actor; the driver fetches and adds up.

A report replaces the earlier one of the same part or engine, so repeated work or reports never count twice.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from drafter.statistics import BatchChoice, DecodeCounts, mean_acceptance_length, merged_choices, per_second

BEAT_SECONDS = 2.0
"""Seconds between an engine's reports."""


@dataclass(frozen=True)
class PartReport:
    """Progress of a part.

    Args:
        rows: Rows done, errors included.
        steps: Decode steps that finished rows took part in.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0

    def plus(self, other: PartReport) -> PartReport:
        return PartReport(
            self.rows + other.rows,
            self.errors + other.errors,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    def minus(self, other: PartReport) -> PartReport:
        return self.plus(PartReport(-other.rows, -other.errors, -other.tokens, -other.steps))


@dataclass(frozen=True)
class EngineFacts:
    """An engine's models and verifier. Saved in `run.json`, as all engines of a job have the same.

    Args:
        lossless: Whether the tokens are exactly those of plain decoding.
    """

    base_fingerprint: str
    verifier: str
    lossless: bool
    verifier_settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineReport:
    """The state of an engine.

    Args:
        seconds: Seconds since its process began to load the models.
    """

    seconds: float
    device: str
    facts: EngineFacts
    slots: int
    active: int
    waiting: int
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()


LearnerState = Literal["starting", "measuring", "learning", "resting", "ended"]


@dataclass(frozen=True)
class LearningReport:
    """The state of a job's learner.

    Args:
        state: `measuring` while it pauses so that engines' speed without it can be measured; `ended` after an error or
            too many ends of its process.
        version: Number of the head's newest version; None before the first.
        beta: β of the current weights on held-out rows; None before it was measured.
        published_beta: β of the newest version on the same rows; None before it was measured.
        seconds: Time worked.
        loss: Loss of the newest step, in nats; None before the first.
        taken_seconds: Time that learning has cost the job.
        saved_seconds: Time that the learned head has saved the job.
    """

    state: LearnerState = "starting"
    reason: str = "it begins"
    version: int | None = None
    beta: float | None = None
    published_beta: float | None = None
    versions: int = 0
    discarded: int = 0
    steps: int = 0
    seconds: float = 0.0
    loss: float | None = None
    rows: int = 0
    held_out: int = 0
    nbytes: int = 0
    dropped: int = 0
    taken_seconds: float = 0.0
    saved_seconds: float = 0.0


@dataclass(frozen=True)
class Mail:
    """Reports to the board since the driver last asked.

    Args:
        life: Name of the board's process. A new process knows none of the old one's reports.
        engines: Reports by engine.
        first: Time of the first engine report, in seconds since 1970; None before.
        last: Time of the last part report, in seconds since 1970.
        stage: Latest stage of a starting engine; None before its process runs.
    """

    life: str
    number: int
    parts: Mapping[str, PartReport]
    engines: Mapping[str, EngineReport]
    first: float | None = None
    last: float | None = None
    stage: str | None = None
    failure: str | None = None
    crash: str | None = None


State = Literal["starting", "generating", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Progress:
    """Progress of the job.

    Args:
        before: Rows that earlier submissions finished, errors included.
        rows: Rows that this submission has done, errors included.
        seconds: Time from the first engine's first report to the last row.
        recent_row_rate: Rows per second over the last ten minutes, used for the ETA.
        engine_seconds: Lifetimes of all engines, ended ones included.
        failure: Why an engine could not load its models, or why the job ended.
    """

    state: State = "starting"
    total: int | None = None
    before: int = 0
    errors_before: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    recent_row_rate: float = 0.0
    engines: int = 0
    slots: int = 0
    active: int = 0
    waiting: int = 0
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()
    engine_seconds: float = 0.0
    device: str | None = None
    facts: EngineFacts | None = None
    failure: str | None = None
    crash: str | None = None
    stage: str = "starting"
    learning: LearningReport | None = None

    @property
    def done(self) -> int:
        return self.before + self.rows

    @property
    def tokens_per_second(self) -> float:
        return per_second(self.tokens, self.seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows per second of this submission, errors included."""
        return per_second(self.rows, self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step over this submission's finished rows."""
        return mean_acceptance_length(DecodeCounts(num_output_tokens=self.tokens, num_decode_steps=self.steps))

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds left; None while there is no rate.

        Earlier submissions' rows are done, but say nothing about this one's speed.
        """
        if self.total is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        return left / self.recent_row_rate if self.recent_row_rate > 0 else None


def ending(error: BaseException | None) -> State:
    """Return the end state of a `with` block that raised `error`."""
    return "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"


_SILENT_SECONDS = 20.0
"""An engine silent for this long counts as ended."""
_WINDOW_SECONDS = 600.0
"""Window of the row rate behind the ETA."""
_SAMPLE_SECONDS = 1.0


@dataclass
class Tally:
    """Adds up the board's reports. Reports lost with a board are never counted twice, only missed.

    Args:
        kept: Those of them in unfinished parts. Engines report them again with their parts.
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


Report = TypeVar("Report")


class _Box(Generic[Report]):
    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, Report]] = {}

    def put(self, sender: str, number: int, report: Report) -> None:
        self._reports[sender] = (number, report)

    def after(self, number: int) -> dict[str, Report]:
        self._reports = {sender: one for sender, one in self._reports.items() if one[0] > number}
        return {sender: report for sender, (_, report) in self._reports.items()}


class ProgressBoard:
    """Keeps engines' reports for the driver. Run as a Ray actor, but independent of Ray."""

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
        self._stage = stage

    def failed(self, message: str) -> None:
        self._failure = message

    def crashed(self, message: str) -> None:
        self._crash = message

    def engine(self, name: str, report: EngineReport) -> None:
        """Record an engine's state; the name is new for each process."""
        self._number += 1
        self._engines.put(name, self._number, report)
        self._first = self._first or time.time()

    def update(self, part: str, report: PartReport) -> None:
        self._number += 1
        self._parts.put(part, self._number, report)
        self._last = time.time()

    def mail(self, life: str, number: int) -> Mail:
        """Return the reports after `number`, or all if `number` is from another `life`."""
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

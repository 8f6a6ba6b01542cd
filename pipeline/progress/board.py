"""What engines report of themselves and of their parts.

A report replaces the earlier one of the same part or engine, so that neither repeated work nor a repeated report is
counted twice.
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
"""Engines report their state this often."""


@dataclass(frozen=True)
class PartReport:
    """How much of a part is generated.

    Args:
        rows: Rows done, errors included.
        errors: Rows that could not be generated.
        tokens: New tokens of finished rows.
        steps: Decode steps that finished rows took part in.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0

    def plus(self, other: PartReport) -> PartReport:
        """Return the sum of both."""
        return PartReport(
            self.rows + other.rows,
            self.errors + other.errors,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    def minus(self, other: PartReport) -> PartReport:
        """Return what is left without `other`."""
        return self.plus(PartReport(-other.rows, -other.errors, -other.tokens, -other.steps))


@dataclass(frozen=True)
class EngineFacts:
    """What an engine decodes with; kept in `run.json`, as all engines of a job have the same.

    Args:
        base_fingerprint: Fingerprint of the base model.
        verifier: Name of the verifier, which decides which draft tokens are kept.
        lossless: Whether the tokens are exactly those of plain decoding.
        verifier_settings: The numbers that the verifier decides by, by name.
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
        device: The device that it runs on, by its maker's name.
        facts: What it decodes with.
        slots: Sequences that it decodes together at most.
        active: Sequences that it decodes now.
        waiting: Requests that wait for a slot.
        memory_tokens: Tokens of texts that its drafter remembers.
        memory_bytes: Bytes that this memory takes.
        choices: What it has chosen to draft with, by batch size.
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
        state: What it is doing: `measuring` while it stands aside for a moment, to see how fast engines are without it;
            `ended` if it had an error, or its process ended too often.
        reason: Why, in a line for people.
        version: Number of the newest version of the head; None before the first one.
        beta: β of what it has learnt by now, on held-out rows; None before it was measured.
        published_beta: β of the newest version on the same rows; None before it was measured.
        versions: Versions that were published, in all submissions.
        discarded: Versions that were given up because their loss was not finite.
        steps: Optimiser steps.
        seconds: For which it has worked.
        loss: Of the newest step, in nats; None before the first one.
        rows: Rows to learn from that it has.
        held_out: Rows to measure on that it has.
        nbytes: Bytes of both.
        dropped: Batches of rows that its process did not get to.
        taken_seconds: By which it has made the job longer.
        saved_seconds: By which what was learnt has made the job shorter.
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
    """What the board was told since the driver last asked.

    Args:
        life: Name of the board's process; another one knows nothing of what this one was told.
        number: Number of the last report in it.
        parts: Reports by part.
        engines: Reports by engine.
        first: When the first engine reported, in seconds since 1970; None before.
        last: When a part was last reported, in seconds since 1970.
        stage: What an engine that starts was doing last; None before its process runs.
        failure: Why an engine could not load its models.
        crash: Why an engine's process ended last.
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


# ---- How far a job is, at one moment.

State = Literal["starting", "generating", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Progress:
    """How far the job is.

    Args:
        state: What it is doing, or how this submission ended.
        total: Rows of the input.
        before: Rows that earlier submissions finished, errors included.
        errors_before: Errors among them.
        rows: Rows that this submission has done, errors included.
        errors: Errors among them.
        tokens: New tokens of this submission's rows.
        steps: Decode steps of this submission's rows.
        seconds: From the first engine's first report to the last row.
        recent_row_rate: Rows of this submission a second, over the last ten minutes: what is left is estimated by it.
        engines: Engines at work.
        slots: Sequences that they decode together at most.
        active: Sequences that they decode now.
        waiting: Requests that wait for a slot.
        memory_tokens: Tokens of texts that their drafters remember.
        memory_bytes: Bytes that these memories take.
        choices: What the engines have chosen to draft with, by batch size.
        engine_seconds: Seconds that all engines have existed, ended ones included.
        device: The devices that the engines run on.
        facts: What the engines decode with, once one has loaded its models.
        failure: Why an engine could not load its models, or why the job ended.
        crash: Why an engine's process ended last.
        stage: What is done while it starts, in words for people.
        learning: What the job's learner does; None without one.
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
        """Rows done by all submissions."""
        return self.before + self.rows

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of this submission; see `per_second`."""
        return per_second(self.tokens, self.seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows a second of this submission, errors included."""
        return per_second(self.rows, self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length of this submission's finished rows, in tokens per step."""
        return mean_acceptance_length(DecodeCounts(num_output_tokens=self.tokens, num_decode_steps=self.steps))

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end at the present rate; None while there is no rate.

        Rows of earlier submissions are done, but tell nothing about how fast this one is.
        """
        if self.total is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        return left / self.recent_row_rate if self.recent_row_rate > 0 else None


def ending(error: BaseException | None) -> State:
    """Return how a `with` block has ended that `error` left."""
    return "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"


# ---- The tally: what the board was told, added up to how far the job is.

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


# ---- The board: one small actor that engines report to and the driver fetches from.

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

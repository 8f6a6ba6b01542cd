"""How far a job is: engines report to one small actor, the driver adds it up and shows it.

The actor keeps nothing that the driver has not got: it may die, and Ray starts another. A report replaces the earlier
one of the same part or engine, so that neither repeated work nor a repeated report is counted twice.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

import ray

from drafter.statistics import DecodeCounts, mean_acceptance_length
from pipeline.progress.pulse import Pulse

Report = TypeVar("Report")
State = Literal["starting", "generating", "finished", "failed", "stopped"]

BEAT_SECONDS = 2.0
"""Engines report their state this often."""
_SILENT_SECONDS = 20.0
"""An engine that has not reported for so long is taken for ended."""
_POLL_SECONDS = 0.5
_WINDOW_SECONDS = 600.0
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class PartReport:
    """How much of a part is generated.

    Args:
        rows: Rows done, errors included.
        errors: Rows that could not be generated.
        tokens: New tokens of finished rows.
        steps: Decode steps that they took part in.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0

    def plus(self, other: PartReport) -> PartReport:
        """Both together."""
        return PartReport(
            self.rows + other.rows,
            self.errors + other.errors,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    def minus(self, other: PartReport) -> PartReport:
        """What is left without `other`."""
        return self.plus(PartReport(-other.rows, -other.errors, -other.tokens, -other.steps))


@dataclass(frozen=True)
class EngineReport:
    """An engine, seen from its process.

    Args:
        seconds: Since its process began to load the models.
        device: What it runs on, by its maker's name.
        fingerprint: Of its base model.
        slots: Requests that it decodes together at most.
        active: Requests that it decodes now.
        waiting: Requests that wait for a slot.
    """

    seconds: float
    device: str
    fingerprint: str
    slots: int
    active: int
    waiting: int


@dataclass(frozen=True)
class Mail:
    """What the board was told since the driver last asked.

    Args:
        life: Changes when the board starts anew.
        number: Of the last report in it.
        parts: Reports by part.
        engines: Reports by engine.
        first: When the first engine reported, in seconds of the clock on the wall; None before.
        last: When the last part was reported.
        failure: Why an engine could not load its models.
        crash: Why an engine's process ended last.
    """

    life: str
    number: int
    parts: Mapping[str, PartReport]
    engines: Mapping[str, EngineReport]
    first: float | None = None
    last: float | None = None
    failure: str | None = None
    crash: str | None = None


class _Box(Generic[Report]):
    """The newest report of each sender, until it is fetched."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, Report]] = {}

    def put(self, sender: str, number: int, report: Report) -> None:
        self._reports[sender] = (number, report)

    def after(self, number: int) -> dict[str, Report]:
        """The reports after `number`; those up to it have arrived, and are forgotten."""
        self._reports = {sender: one for sender, one in self._reports.items() if one[0] > number}
        return {sender: report for sender, (_, report) in self._reports.items()}


class ProgressBoard:
    """Where engines report to: a letter box that the driver empties."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._number = 0
        self._parts: _Box[PartReport] = _Box()
        self._engines: _Box[EngineReport] = _Box()
        self._first: float | None = None
        self._last: float | None = None
        self._failure: str | None = None
        self._crash: str | None = None

    def failed(self, message: str) -> None:
        """An engine could not be loaded."""
        self._failure = message

    def crashed(self, message: str) -> None:
        """An engine's process is about to end."""
        self._crash = message

    def engine(self, name: str, report: EngineReport) -> None:
        """An engine is there; its name is new for each process."""
        self._number += 1
        self._engines.put(name, self._number, report)
        self._first = self._first or time.time()

    def update(self, part: str, report: PartReport) -> None:
        """So much of a part is done."""
        self._number += 1
        self._parts.put(part, self._number, report)
        self._last = time.time()

    def mail(self, life: str, number: int) -> Mail:
        """What has been reported after report `number`, if that was in this `life` of the board: or else everything."""
        arrived = number if life == self._life else 0
        return Mail(
            self._life,
            self._number,
            self._parts.after(arrived),
            self._engines.after(arrived),
            self._first,
            self._last,
            self._failure,
            self._crash,
        )


@dataclass(frozen=True)
class Progress:
    """How far the job is.

    Args:
        state: What it is doing, or how this submission ended.
        total: Rows of the input.
        before: Rows that earlier submissions finished, errors included.
        errors_before: Their errors.
        rows: Rows that this submission has done, errors included.
        errors: Its errors.
        tokens: New tokens of its rows.
        steps: Decode steps of its rows.
        seconds: From the first engine's first sign to the last row.
        row_rate: Rows a second, of this submission alone and of the last ten minutes.
        token_rate: New tokens a second, likewise.
        engines: Engines at work.
        slots: Requests that they decode together at most.
        active: Requests that they decode.
        waiting: Requests that wait for a slot.
        engine_seconds: Seconds that all engines have existed, the ended ones too.
        device: What the engines run on.
        fingerprint: Of the base model, once an engine has loaded it.
        failure: Why an engine could not load its models, or why the job ended.
        crash: Why an engine's process ended last.
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
    row_rate: float = 0.0
    token_rate: float = 0.0
    engines: int = 0
    slots: int = 0
    active: int = 0
    waiting: int = 0
    engine_seconds: float = 0.0
    device: str | None = None
    fingerprint: str | None = None
    failure: str | None = None
    crash: str | None = None

    @property
    def done(self) -> int:
        """Rows done by all submissions."""
        return self.before + self.rows

    @property
    def beta(self) -> float:
        """β of this submission's finished rows."""
        return mean_acceptance_length(DecodeCounts(num_output_tokens=self.tokens, num_decode_steps=self.steps))

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end at the present rate; None while there is no rate.

        The rows of earlier submissions are done, but they say nothing about how fast this one is.
        """
        if self.total is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        return left / self.row_rate if self.row_rate > 0 else None


@dataclass
class Tally:
    """Adds up what the board was told. It counts low, never twice, if reports are lost with a board.

    Args:
        total: Rows of the input.
        before: Rows of earlier submissions.
        errors_before: Their errors.
        kept: Those of them that are in no finished part; reports of these parts will have them too.
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
    _failure: str | None = None
    _crash: str | None = None
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    def __post_init__(self, kept: Mapping[str, PartReport]) -> None:
        self._parts.update(kept)  # and not to the sum: it took this submission no time

    def take(self, mail: Mail, now: float) -> None:
        """Enter the board's mail, at `now` of the clock on the wall."""
        self.life, self.number = mail.life, mail.number
        for name, report in mail.parts.items():
            self._sum = self._sum.plus(report).minus(self._parts.get(name, PartReport()))
            self._parts[name] = report
        self._engines.update({name: (now, report) for name, report in mail.engines.items()})
        if self._first is None:
            self._first = mail.first
        self._last = max(self._last, mail.last or 0.0)
        self._failure = mail.failure or self._failure
        self._crash = mail.crash or self._crash

    def progress(self, now: float) -> Progress:
        """How far the job is at `now`."""
        row_rate, token_rate = self._rates(now)
        reports = [report for _, report in self._engines.values()]
        alive = [report for seen, report in self._engines.values() if now - seen < _SILENT_SECONDS]
        return Progress(
            state="starting" if self._first is None else "generating",
            total=self.total,
            before=self.before,
            errors_before=self.errors_before,
            **vars(self._sum),
            seconds=max(self._last - self._first, 0.0) if self._first is not None else 0.0,
            row_rate=row_rate,
            token_rate=token_rate,
            engines=len(alive),
            slots=sum(report.slots for report in alive),
            active=sum(report.active for report in alive),
            waiting=sum(report.waiting for report in alive),
            engine_seconds=sum(report.seconds for report in reports),
            device=", ".join(dict.fromkeys(report.device for report in reports)) or None,
            fingerprint=reports[0].fingerprint if reports else None,
            failure=self._failure,
            crash=self._crash,
        )

    def _rates(self, now: float) -> tuple[float, float]:
        """Rows and tokens a second, over the last ten minutes or since the first engine was there."""
        if self._first is None:
            return 0.0, 0.0
        if not self._samples:
            self._samples.append((self._first, 0, 0))
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_SECONDS:
            self._samples.popleft()
        then, rows_then, tokens_then = self._samples[0]
        rows, tokens = self._sum.rows, self._sum.tokens
        if now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((now, rows, tokens))
        if now <= then:
            return 0.0, 0.0
        # A part that is done again counts from the beginning, and there may be less than there was.
        return max(rows - rows_then, 0) / (now - then), max(tokens - tokens_then, 0) / (now - then)


def ending(error: BaseException | None) -> State:
    """How a `with` block that `error` left has ended."""
    return "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"


class Viewer(Protocol):
    """What shows progress somewhere."""

    def show(self, now: Progress) -> None:
        """Called twice a second, and once at the end."""


class ProgressWatch:
    """Fetches the board's mail and shows what came of it, until the end of a `with` block.

    Args:
        board: A `ProgressBoard` actor.
        tally: Where the job begins.
        on_start: Called when the first engine is ready.
        viewers: Where to show it.
    """

    def __init__(
        self, board: Any, tally: Tally, on_start: Callable[[Progress], None], viewers: Sequence[Viewer]
    ) -> None:
        self._board, self._tally, self._on_start, self._viewers = board, tally, on_start, viewers
        self._pulse = Pulse(_POLL_SECONDS, self._look)
        self.last = tally.progress(time.time())

    def __enter__(self) -> ProgressWatch:
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.end()
        if error is None:  # whatever was reported: all parts are in the output
            rows = self._tally.total - self._tally.before
            rate = rows / self.last.seconds if self.last.seconds > 0 else 0.0
            self.last = replace(self.last, rows=rows, row_rate=rate)
        self.last = replace(self.last, state=ending(error))
        for viewer in self._viewers:
            viewer.show(self.last)

    def _look(self) -> None:
        try:
            mail: Mail = ray.get(self._board.mail.remote(self._tally.life, self._tally.number), timeout=10)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            pass  # the board died with its node, or the cluster is busy: the job goes on, and the board comes back
        else:
            self._tally.take(mail, time.time())
        before, self.last = self.last, self._tally.progress(time.time())
        if before.state == "starting" and self.last.state == "generating":
            self._on_start(self.last)
        for viewer in self._viewers:
            viewer.show(self.last)

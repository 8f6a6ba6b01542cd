"""Shows a job's progress while it runs: a bar on a terminal or lines elsewhere, and `status.json` in the output."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO

import ray
from tqdm import tqdm

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.command_line import say
from pipeline.io.files import Location
from pipeline.output.folder import read_status
from pipeline.output.summary import speculation_record
from pipeline.progress.board import Mail, Progress, State, Tally

_FIRST_LINES_SECONDS = 5.0
_LINES_SHARE = 0.02
_LAST_LINES_SECONDS = 600.0
_WRITE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_MAIL_SECONDS = 10


class Viewer(Protocol):
    def show(self, now: Progress) -> None:
        """Show the progress; called twice a second, and once at the end."""


def display(stream: TextIO | None = None) -> Viewer:
    """Return a bar or lines, as suits `stream` (stderr by default). Some containers' terminals have size 0."""
    stream = stream or sys.stderr
    has_room = stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0
    return Bar(stream) if has_room else Lines(stream)


class Bar:
    def __init__(self, stream: TextIO) -> None:
        self._bar = tqdm(
            file=stream, dynamic_ncols=True, bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        )

    def show(self, now: Progress) -> None:
        self._bar.total, self._bar.n = now.total, now.done
        self._bar.set_description_str(now.stage if now.state == "starting" else now.state, refresh=False)
        self._bar.set_postfix_str(", ".join(rates(now)))
        if now.state not in ("starting", "generating"):
            self._bar.close()


class Lines:
    """Prints a line for each stage of the start, then for new rows every few seconds, later every ten minutes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = self._printed = time.monotonic()
        self._rows, self._line = -1, ""  # what was printed last
        self._stage: str | None = None

    def show(self, now: Progress) -> None:
        if now.state == "starting":
            if now.stage != self._stage:
                self._stage = now.stage
                print(now.stage, file=self._stream, flush=True)
            return
        ended = now.state != "generating"
        clock = time.monotonic()
        pause = min(max(_FIRST_LINES_SECONDS, _LINES_SHARE * (clock - self._begun)), _LAST_LINES_SECONDS)
        due = clock - self._printed >= pause and now.rows != self._rows
        if due or (ended and line(now) != self._line):
            self._printed, self._rows, self._line = clock, now.rows, line(now)
            print(self._line, file=self._stream, flush=True)


def line(now: Progress) -> str:
    return ", ".join([f"{now.done}/{now.total} rows", *rates(now)])


def rates(now: Progress) -> list[str]:
    said = [f"{now.rows_per_second:.1f} rows/s", f"{now.tokens_per_second:,.0f} tokens/s"]
    if now.steps:
        said.append(f"{now.acceptance_length:.2f} tokens a step")
    if now.learning is not None and now.learning.version is not None:
        said.append(f"head {now.learning.version}")
    eta = now.eta_seconds
    said.append(f"{'?' if eta is None else tqdm.format_interval(eta)} left")
    if now.errors:
        said.append(f"{now.errors} failed")
    return said


def ending(error: BaseException | None) -> State:
    """Return the end state of a `with` block that raised `error`."""
    return "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"


class StatusFile:
    """Writes `status.json` throughout a `with` block, which is one submission.

    Only a killed process leaves it at `generating`, with an old `updated_at`. It keeps each submission's use of
    resources, from which `drafter report` computes the cost.
    """

    def __init__(self, file: Location) -> None:
        self._file = file
        self._begun = _now()
        earlier = read_status(file).get("submissions")
        self._earlier = earlier if isinstance(earlier, list) else []
        self._resources: ActorResources | None = None
        self._now = Progress()
        self._written = 0.0
        self._warned = False

    def __enter__(self) -> StatusFile:
        self._write()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Write how the submission ended."""
        failure = None if error is None else one_line(error)
        self._now = replace(self._now, state=ending(error), failure=failure)
        self._write()

    def takes(self, resources: ActorResources) -> None:
        self._resources = resources

    def show(self, now: Progress) -> None:
        """Write the progress, if it is due or the state is new."""
        new = now.state != self._now.state
        self._now = now
        if new or time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            self._file.write_text(json.dumps(self._content(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:  # the job goes on without its status
            if not self._warned:
                say(f"{self._file.path} cannot be written: {one_line(error)}")
            self._warned = True

    def _content(self) -> dict[str, Any]:
        now = self._now
        eta = now.eta_seconds
        return {
            "state": now.state,
            "updated_at": _now(),
            "rows_total": now.total,
            "rows_done": now.done,
            "errors": now.failed,
            "rows_per_second": round(now.rows_per_second, 3),
            "tokens_per_second": round(now.tokens_per_second, 1),
            "eta_seconds": None if eta is None else round(eta, 1),
            "mean_acceptance_length": round(now.acceptance_length, 4) if now.steps else None,
            "engines": now.engines,
            "slots": now.slots,
            "slots_active": now.active,
            "requests_waiting": now.waiting,
            "memory_tokens": now.memory_tokens,
            "memory_bytes": now.memory_bytes,
            "speculation": speculation_record(now.choices),
            "failure": now.failure,
            "last_crash": now.crash,
            **({} if now.learning is None else {"learning": asdict(now.learning)}),
            "submissions": self.submissions,
        }

    @property
    def submissions(self) -> list[dict[str, Any]]:
        """What each submission took, this one last."""
        return [*self._earlier, self._submission()]

    def _submission(self) -> dict[str, Any]:
        now, resources = self._now, self._resources
        return {
            "begun_at": self._begun,
            "rows": now.rows,
            "errors": now.errors,
            "tokens": now.tokens,
            "engine_tokens": now.engine_tokens,
            "seconds": round(now.seconds, 3),
            "device": now.device,
            "engine_seconds": round(now.engine_seconds, 3),
            "gpu_seconds": round(now.engine_seconds * resources.gpus, 3) if resources else 0.0,
            "cpu_seconds": round(now.engine_seconds * resources.cpus, 3) if resources else 0.0,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Pulse:
    """Calls a function every few seconds in a daemon thread: from `start` on, or in a `with` block.

    An exception from the function ends the thread, and Python prints it.
    """

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Start the thread; the first call comes after `seconds`."""
        self._thread.start()

    def end(self) -> None:
        """Call once more, and wait until that call and the thread have ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(self._seconds)
            self._work()


def fetch(board: Any, last: Mail) -> Mail:
    """Return a `StatusBoard` actor's reports since `last`; none if its node died or the cluster is busy.

    The job goes on in either case: the board comes back, and what has not arrived is sent again.
    """
    try:
        mail: Mail = ray.get(board.mail.remote(last.life, last.number), timeout=_MAIL_SECONDS)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return replace(last, reports={})
    return mail


class ProgressWatch:
    """Fetches the board's mail and shows the progress, until the end of a `with` block.

    It calls `on_start` when the first engine is ready; `complete` adds progress from elsewhere than engines.
    """

    def __init__(
        self,
        board: Any,
        tally: Tally,
        on_start: Callable[[Progress], None],
        viewers: Sequence[Viewer],
        complete: Callable[[Progress], Progress] | None = None,
    ) -> None:
        self._complete = complete
        self._board, self._tally, self._on_start, self._viewers = board, tally, on_start, viewers
        self._pulse = Pulse(_POLL_SECONDS, self._look)
        self.last = tally.progress(time.time())

    def __enter__(self) -> ProgressWatch:
        self._pulse.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pulse.end()
        if error is None:  # all parts are in the output, whatever was reported
            self.last = replace(self.last, rows=self._tally.total - self._tally.before)
        self.last = replace(self.last, state=ending(error))
        for viewer in self._viewers:
            viewer.show(self.last)

    def _look(self) -> None:
        self._tally.take(fetch(self._board, self._tally.mail), time.time())
        now = self._tally.progress(time.time())
        before, self.last = self.last, now if self._complete is None else self._complete(now)
        if before.state == "starting" and self.last.state == "generating":
            self._on_start(self.last)
        for viewer in self._viewers:
            viewer.show(self.last)

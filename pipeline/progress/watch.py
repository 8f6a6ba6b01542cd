"""Display of a job's progress: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, TextIO

import ray
from tqdm import tqdm

from pipeline.progress.board import Mail, Progress, Tally, ending

_FIRST_LINES_SECONDS = 5.0
_LINES_SHARE = 0.02
_LAST_LINES_SECONDS = 600.0


def display(stream: TextIO | None = None) -> Viewer:
    """Return a bar or lines, as suits `stream` (stderr by default)."""
    stream = stream or sys.stderr
    return Bar(stream) if _has_room(stream) else Lines(stream)


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
        self._last: tuple[str, int] | None = None
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
        if ended or (clock - self._printed >= pause and (now.state, now.rows) != self._last):
            self._printed, self._last = clock, (now.state, now.rows)
            print(line(now), file=self._stream, flush=True)


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


def _has_room(stream: TextIO) -> bool:
    """Return whether a bar can be drawn: not without a terminal, nor on one of size 0, as in some containers."""
    return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0


class Pulse:
    """Calls a function every few seconds, in a daemon thread.

    Args:
        work: The function. An exception from it ends the thread, and Python prints it.
    """

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

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


_POLL_SECONDS = 0.5
_MAIL_SECONDS = 10


class Viewer(Protocol):
    def show(self, now: Progress) -> None:
        """Show the progress; called twice a second, and once at the end."""


class ProgressWatch:
    """Fetches the board's mail and shows the progress, until the end of a `with` block.

    Args:
        on_start: Called when the first engine is ready.
        complete: Adds progress from elsewhere than engines; called twice a second.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.end()
        if error is None:  # all parts are in the output, whatever was reported
            self.last = replace(self.last, rows=self._tally.total - self._tally.before)
        self.last = replace(self.last, state=ending(error))
        for viewer in self._viewers:
            viewer.show(self.last)

    def _look(self) -> None:
        try:
            mail: Mail = ray.get(self._board.mail.remote(self._tally.life, self._tally.number), timeout=_MAIL_SECONDS)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            pass  # the board died with its node, or the cluster is busy: the job goes on, and the board comes back
        else:
            self._tally.take(mail, time.time())
        now = self._tally.progress(time.time())
        before, self.last = self.last, now if self._complete is None else self._complete(now)
        if before.state == "starting" and self.last.state == "generating":
            self._on_start(self.last)
        for viewer in self._viewers:
            viewer.show(self.last)

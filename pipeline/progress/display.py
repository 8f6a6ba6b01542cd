"""Progress for a person: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from tqdm import tqdm

from pipeline.progress.job_progress import Progress
from pipeline.progress.watch import Viewer

_FIRST_LINES_SECONDS = 5.0
_LINES_SHARE = 0.02
_LAST_LINES_SECONDS = 600.0


def display(stream: TextIO | None = None) -> Viewer:
    """Return a bar or lines, as suits `stream` (stderr by default)."""
    stream = stream or sys.stderr
    return Bar(stream) if _has_room(stream) else Lines(stream)


class Bar:
    """Shows a bar on a terminal.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._bar = tqdm(
            file=stream, dynamic_ncols=True, bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        )

    def show(self, now: Progress) -> None:
        """Draw the bar."""
        self._bar.total, self._bar.n = now.total, now.done
        self._bar.set_description_str(now.stage if now.state == "starting" else now.state, refresh=False)
        self._bar.set_postfix_str(", ".join(rates(now)))
        if now.state not in ("starting", "generating"):
            self._bar.close()


class Lines:
    """Prints a line for each stage of the start, then one when there are new rows: every few seconds at first, in a
    long job every ten minutes.

    Args:
        stream: Where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = self._printed = time.monotonic()
        self._last: tuple[str, int] | None = None
        self._stage: str | None = None

    def show(self, now: Progress) -> None:
        """Print a line if it is time for one."""
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
    """Return the progress as one line."""
    return ", ".join([f"{now.done}/{now.total} rows", *rates(now)])


def rates(now: Progress) -> list[str]:
    """Return how fast the job goes, when it will be done, and how many rows went wrong."""
    said = [f"{now.rows_per_second:.1f} rows/s", f"{now.tokens_per_second:,.0f} tokens/s"]
    if now.steps:
        said.append(f"{now.acceptance_length:.2f} tokens a step")
    if now.learning is not None and now.learning.version is not None:
        said.append(f"head {now.learning.version}")
    eta = now.eta_seconds
    said.append(f"{'?' if eta is None else tqdm.format_interval(eta)} left")
    if now.errors:
        said.append(f"{now.errors} errors")
    return said


def _has_room(stream: TextIO) -> bool:
    """Whether a bar can be drawn: not without a terminal, and not on one of size 0, as in some containers."""
    return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0

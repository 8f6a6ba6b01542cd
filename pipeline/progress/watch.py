"""The watch: the driver's thread that fetches the board's mail and shows how far the job is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import ray

from pipeline.progress.job_progress import Progress, ending
from pipeline.progress.pulse import Pulse
from pipeline.progress.reports import Mail
from pipeline.progress.tally import Tally

_POLL_SECONDS = 0.5
_MAIL_SECONDS = 10


class Viewer(Protocol):
    """Shows progress somewhere."""

    def show(self, now: Progress) -> None:
        """Show it; called twice a second, and once at the end."""


class ProgressWatch:
    """Watches the board until the end of a `with` block.

    Args:
        board: A `ProgressBoard` actor.
        tally: Where the job begins.
        on_start: Called when the first engine is ready.
        viewers: Where to show the progress.
        complete: Adds what others than engines have to say; called twice a second.
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

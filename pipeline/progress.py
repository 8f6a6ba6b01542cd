"""How far a job is: engines report to one small actor, the driver shows it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import ray
from tqdm import tqdm

_LINE_SECONDS = 5.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Snapshot:
    """How far all engines are together.

    Args:
        engines: Engines that have loaded their models.
        rows: Rows done, errors included.
        errors: Rows that could not be generated.
        tokens: New tokens.
        seconds: From the first engine's start to the last report.
        fingerprint: Of the base model, once an engine has loaded it.
        failure: Why an engine could not load its models.
        crash: Why an engine's process ended last.
    """

    engines: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float = 0.0
    fingerprint: str | None = None
    failure: str | None = None
    crash: str | None = None


class ProgressBoard:
    """Collects the engines' reports. A report replaces the part's earlier one: repeated work is not counted twice."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int, int]] = {}
        self._engines = 0
        self._begun = self._last = 0.0
        self._fingerprint: str | None = None
        self._failure: str | None = None
        self._crash: str | None = None

    def loaded(self, fingerprint: str) -> None:
        """An engine is ready."""
        if not self._engines:
            self._begun = self._last = time.monotonic()
        self._engines += 1
        self._fingerprint = fingerprint

    def failed(self, message: str) -> None:
        """An engine could not be loaded."""
        self._failure = message

    def crashed(self, message: str) -> None:
        """An engine's process is about to end."""
        self._crash = message

    def update(self, part: str, rows: int, errors: int, tokens: int) -> None:
        """So much of a part is done."""
        self._parts[part] = (rows, errors, tokens)
        self._last = time.monotonic()

    def snapshot(self) -> Snapshot:
        """All reports together."""
        rows, errors, tokens = map(sum, zip(*self._parts.values(), strict=True)) if self._parts else (0, 0, 0)
        seconds = self._last - self._begun
        return Snapshot(self._engines, rows, errors, tokens, seconds, self._fingerprint, self._failure, self._crash)


class ProgressDisplay:
    """Shows a board until the end of a `with` block: a bar on a terminal, a line every few seconds elsewhere.

    Args:
        board: A `ProgressBoard` actor.
        total: Rows of the input.
        done: Those of them that were there before.
        on_start: Called when the first engine is ready.
        stream: Where to.
    """

    def __init__(
        self,
        board: Any,
        total: int,
        done: int,
        on_start: Callable[[Snapshot], None],
        stream: TextIO | None = None,
    ) -> None:
        self._board, self._total, self._done = board, total, done
        self._on_start = on_start
        self._stream = stream or sys.stderr
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self.last = Snapshot()

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last_line = time.monotonic()
        terminal = _has_room(self._stream)
        bar = tqdm(
            total=self._total,
            initial=self._done,
            unit=" rows",
            desc="generating",
            file=self._stream,
            disable=not terminal,
            dynamic_ncols=True,
        )
        ending = False
        while not ending:
            ending = self._stop.wait(_POLL_SECONDS)
            try:
                now = ray.get(self._board.snapshot.remote(), timeout=10)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue  # the board died with its node, or the cluster is busy: the job goes on unseen
            if now.engines and not self.last.engines:
                bar.unpause()  # the rate shall not count the time until the models are loaded
                self._on_start(now)
            changed, self.last = now != self.last, now
            if terminal:
                bar.n = self._done + now.rows
                bar.set_postfix_str(f"{_rate(now.tokens, now):,.0f} tokens/s" + _errors(now))
            elif ending or (changed and time.monotonic() - last_line >= _LINE_SECONDS):
                last_line = time.monotonic()
                print(self._line(now), file=self._stream, flush=True)
        bar.close()

    def _line(self, now: Snapshot) -> str:
        done, rows = self._done + now.rows, _rate(now.rows, now)
        left = tqdm.format_interval((self._total - done) / rows) if rows else "?"
        speed = f"{rows:.1f} rows/s, {_rate(now.tokens, now):,.0f} tokens/s"
        return f"{done}/{self._total} rows, {speed}, {left} left{_errors(now)}"


def _has_room(stream: TextIO) -> bool:
    """Whether a bar can be drawn: on a terminal, and not on one of no size, as in some containers."""
    return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0


def _rate(amount: int, now: Snapshot) -> float:
    return amount / now.seconds if now.seconds > 0 else 0.0


def _errors(now: Snapshot) -> str:
    return f", {now.errors} errors" if now.errors else ""

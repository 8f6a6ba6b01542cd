"""Feeds an engine with the rows of several parts, in the order in which they take the least time.

The feeder keeps slightly more rows in the engine than there are slots, starts long rows first, and runs rows that may
have killed an engine alone. One thread submits rows after the ledger has recorded them, so the ledger's rows inside an
engine are those that it is working on, or about to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from drafter.errors import NotFiniteError, RequestError, RequestTimeoutError, one_line
from drafter.requests import SamplingParams
from pipeline.engines.ledger import ALONE_FROM, RowKey, RowOutcome
from pipeline.engines.models import capacity
from pipeline.errors import JobError, ProblemType, RowError
from pipeline.progress.board import BEAT_SECONDS

logger = logging.getLogger(__name__)

_OF_THE_ROW = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
"""What Python and libraries raise about a value that nobody has thought of. An engine that has failed, a device, memory
and files raise others: these are no row's fault."""
_PULSE_SECONDS = (1.0, 5.0)
"""Shortest and longest pause between ledger calls while the engine has rows to go on with: one covers many rows."""
_LEDGER_SHARE = 0.02
"""Of the time, for which a feeder has a call under way: one ledger serves all engines, and slowly when it is busy."""

Report = Callable[[Mapping[str, RowOutcome]], None]


def pause_after(seconds: float) -> float:
    """Return the pause, in seconds, after a ledger call that took so long."""
    shortest, longest = _PULSE_SECONDS
    return min(max(shortest, seconds / _LEDGER_SHARE), longest)


class Work(Protocol):
    """What a row asks of an engine: a `Request`, or a program that makes several."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def sampling(self) -> SamplingParams: ...


class UnderWay(Protocol):
    """Work inside an engine."""

    @property
    def future(self) -> Future[Any]: ...

    def result(self) -> Any: ...


@dataclass
class _Row:
    key: RowKey
    request: Work
    deaths: int

    @property
    def longest(self) -> int:
        """Most tokens of the request, prompt included."""
        return len(self.request.prompt_ids) + self.request.sampling.over().max_new_tokens


@dataclass
class _OpenPart:
    wanted: int
    outcomes: dict[str, RowOutcome]

    @property
    def done(self) -> bool:
        return len(self.outcomes) == self.wanted


class Feeder:
    """Feeds the rows of several parts into one engine.

    Args:
        finish: Returns the output columns of a finished request.
        ledger: A `RemoteLedger`, or a local one with its `open_part` and `exchange`.
    """

    def __init__(
        self,
        submit: Callable[[Any], UnderWay],
        finish: Callable[[Any, Any], dict[str, Any]],
        ledger: Any,
        slots: int,
    ) -> None:
        self._submit, self._finish, self._ledger = submit, finish, ledger
        self._slots, self._capacity = slots, capacity(slots)
        self._waiting: deque[_Row] = deque()
        self._suspects: deque[_Row] = deque()
        self._open: dict[str, _OpenPart] = {}
        self._left: list[tuple[_Row, UnderWay | RowError]] = []
        self._inside = 0
        self._suspect_inside = self._closed = False
        self._failure: Exception | None = None
        self._told = set[type]()
        self._pause = _PULSE_SECONDS[0]
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def generate(self, part: str, requests: Mapping[str, Work], report: Report) -> dict[str, RowOutcome]:
        """Generate a part, and return outcomes by `request_id`. Thread-safe.

        Args:
            report: Called with the outcomes so far when there are new ones, once a beat, but not with all of them.

        Raises:
            JobError: The part is being generated already: its rows would never all come back to both calls.
            Exception: The engine failed, or the ledger cannot be reached.
        """
        opened = _OpenPart(len(requests), {})
        with self._changed:
            if part in self._open:
                raise JobError(f"part {part} was given to an engine twice at once")
            self._open[part] = opened
        try:
            self._queue(part, opened, requests)
            return self._wait(opened, report)
        finally:
            del self._open[part]

    def _queue(self, part: str, opened: _OpenPart, requests: Mapping[str, Work]) -> None:
        known, deaths = self._ledger.open_part(part, len(requests))
        opened.outcomes.update({name: known[name] for name in requests if name in known})
        rows = [
            _Row(RowKey(part, name), request, deaths.get(name, 0))
            for name, request in requests.items()
            if name not in known
        ]
        # Long rows that begin early end with the others; rows of one length also read about as much of the KV cache.
        rows.sort(key=lambda row: -row.longest)
        with self._changed:
            for row in rows:
                (self._suspects if row.deaths >= ALONE_FROM else self._waiting).append(row)
            self._changed.notify_all()

    def _wait(self, opened: _OpenPart, report: Report) -> dict[str, RowOutcome]:
        reported = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: opened.done or self._failure is not None, BEAT_SECONDS)
                if self._failure is not None:
                    raise self._failure
                outcomes, done = dict(opened.outcomes), opened.done
            if done:
                return outcomes
            if len(outcomes) != reported:
                reported = len(outcomes)
                report(outcomes)

    def _run(self) -> None:
        try:
            while True:
                self._exchange()
        except Exception as error:  # whatever it is, `generate` raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _exchange(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._may_enter())
            self._changed.wait_for(self._runs_short, self._pause)
            left, self._left = self._left, []
            entering = self._take()
        outcomes = {row.key: self._outcome(row, result) for row, result in left}
        begun = time.monotonic()
        may_enter = self._ledger.exchange(outcomes, [row.key for row in entering])
        self._pause = pause_after(time.monotonic() - begun)
        with self._changed:
            for key, outcome in outcomes.items():
                self._open[key.part].outcomes[key.request_id] = outcome
            self._closed = not may_enter
            self._changed.notify_all()
        if may_enter:
            for row in entering:
                self._enter(row)

    def _runs_short(self) -> bool:
        """Return whether half of the rows that wait for a slot inside the engine are gone."""
        return self._inside - self._slots <= (self._capacity - self._slots) // 2

    def _may_enter(self) -> int:
        if self._closed or (self._suspect_inside and self._inside):
            return 0
        if self._suspects:
            return 1 if not self._inside else 0
        return min(self._capacity - self._inside, len(self._waiting))

    def _take(self) -> list[_Row]:
        count, queue = self._may_enter(), self._suspects or self._waiting
        if count:
            self._suspect_inside = queue is self._suspects
        self._inside += count
        return [queue.popleft() for _ in range(count)]

    def _enter(self, row: _Row) -> None:
        try:
            handle = self._submit(row.request)
        except RequestError as error:
            self._leave(row, RowError("Refused", str(error), row.deaths + 1))
        except _OF_THE_ROW as error:
            # It would end each engine that the row enters, with all rows beside it.
            if type(error) not in self._told:  # a million rows may have the same mistake
                self._told.add(type(error))
                logger.exception("row %r: the engine cannot take it", row.key.request_id)
            why = f"the engine cannot take it: {type(error).__name__}: {one_line(error)}"
            self._leave(row, RowError("Refused", why, row.deaths + 1))
        else:
            handle.future.add_done_callback(lambda _: self._leave(row, handle))

    def _leave(self, row: _Row, result: UnderWay | RowError) -> None:
        with self._changed:
            self._left.append((row, result))
            self._inside -= 1
            self._changed.notify_all()

    def _outcome(self, row: _Row, result: UnderWay | RowError) -> RowOutcome:
        if isinstance(result, RowError):
            return RowOutcome(problem=vars(result.problem))
        try:
            return RowOutcome(generated=self._finish(result.result(), row.request))
        except RowError as error:  # of a program
            return RowOutcome(problem=vars(replace(error.problem, attempts=row.deaths + 1)))
        except RequestError as error:
            kinds: dict[type, ProblemType] = {RequestTimeoutError: "TimedOut", NotFiniteError: "NotFinite"}
            kind = kinds.get(type(error), "Refused")
            return RowOutcome(problem=vars(RowError(kind, str(error), row.deaths + 1).problem))

"""Feeds the rows of several parts into one engine.

It keeps slightly more rows in the engine than there are slots, starts long rows first, and runs rows that may have
killed an engine alone. One thread submits rows after the ledger has recorded them, so the ledger's rows inside an
engine are those that it is working on, or about to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from drafter.engine.config import EngineConfig, EngineSettings
from drafter.errors import NotFiniteError, RequestError, RequestTimeoutError
from drafter.requests import Generation, Request
from pipeline.engines.ledger import RowKey, RowOutcome
from pipeline.errors import JobError, ProblemType, RowError

if TYPE_CHECKING:  # a driver uses this module without an engine
    from drafter.engine.sequence import Handle

_PULSE_SECONDS = 0.01
"""Wait of the feeder while the engine is full, so that one ledger call covers several rows."""
_REPORT_SECONDS = 0.25


def capacity(slots: int) -> int:
    """Return the rows to keep in an engine: enough that no slot is empty between two pulses."""
    return slots + max(4, slots // 2)


def fed(engine: EngineSettings) -> EngineConfig:
    """Return the sizes of an engine with a queue for the rows that a feeder keeps in it."""
    return EngineConfig(**asdict(engine), max_queue=capacity(engine.max_num_seqs))


def alone_from(row_attempts: int) -> int:
    """Return the number of deaths from which a row has the engine to itself.

    Most deaths are the machine's fault, so a row is first retried in company. Its last two attempts are alone, so that
    one unrelated death at such a moment does not condemn it.
    """
    return max(1, row_attempts - 2)


class RowLedger(Protocol):
    """Interface of the `Ledger` for a feeder."""

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        """See `Ledger.open_part`."""

    def exchange(self, left: Mapping[RowKey, RowOutcome], entering: list[RowKey]) -> bool:
        """See `Ledger.exchange`."""


@dataclass
class _Row:
    key: RowKey
    request: Request
    deaths: int


@dataclass
class _OpenPart:
    wanted: int
    outcomes: dict[str, RowOutcome]

    @property
    def done(self) -> bool:
        return len(self.outcomes) == self.wanted


class Feeder:
    """Feeds rows into one engine.

    Args:
        finish: Returns the output columns of a finished request.
    """

    def __init__(
        self,
        submit: Callable[[Request], Handle],
        finish: Callable[[Generation, Request], dict[str, Any]],
        ledger: RowLedger,
        slots: int,
        row_attempts: int,
    ) -> None:
        self._submit, self._finish, self._ledger = submit, finish, ledger
        self._slots, self._capacity, self._alone_from = slots, capacity(slots), alone_from(row_attempts)
        self._waiting: deque[_Row] = deque()
        self._suspects: deque[_Row] = deque()
        self._open: dict[str, _OpenPart] = {}
        self._left: list[tuple[_Row, Handle | RowError]] = []
        self._inside = 0
        self._suspect_inside = self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def generate(
        self, part: str, requests: Mapping[str, Request], report: Callable[[Mapping[str, RowOutcome]], None]
    ) -> dict[str, RowOutcome]:
        """Generate a part, and return outcomes by `request_id`. Thread-safe.

        Args:
            report: Called now and then with the outcomes so far, and once with all.

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
            return self._generate(part, opened, requests, report)
        finally:
            del self._open[part]

    def _generate(
        self,
        part: str,
        opened: _OpenPart,
        requests: Mapping[str, Request],
        report: Callable[[Mapping[str, RowOutcome]], None],
    ) -> dict[str, RowOutcome]:
        known, deaths = self._ledger.open_part(part, len(requests))
        opened.outcomes.update({name: known[name] for name in requests if name in known})
        rows = [
            _Row(RowKey(part, name), request, deaths.get(name, 0))
            for name, request in requests.items()
            if name not in known
        ]
        # Long rows that begin early end with the others; rows of one length also read about as much of the KV cache.
        rows.sort(key=lambda row: -_longest(row.request))
        with self._changed:
            for row in rows:
                (self._suspects if row.deaths >= self._alone_from else self._waiting).append(row)
            self._changed.notify_all()
        done = False
        while not done:
            with self._changed:
                self._changed.wait_for(lambda: opened.done or self._failure is not None, _REPORT_SECONDS)
                if self._failure is not None:
                    raise self._failure
                outcomes, done = dict(opened.outcomes), opened.done
            report(outcomes)
        return outcomes

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
            full = self._inside >= self._slots
        if full:
            time.sleep(_PULSE_SECONDS)
        with self._changed:
            left, self._left = self._left, []
            entering = self._take()
        outcomes = {row.key: self._outcome(row, result) for row, result in left}
        may_enter = self._ledger.exchange(outcomes, [row.key for row in entering])
        with self._changed:
            for key, outcome in outcomes.items():
                self._open[key.part].outcomes[key.request_id] = outcome
            self._closed = not may_enter
            self._changed.notify_all()
        if may_enter:
            for row in entering:
                self._enter(row)

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
        else:
            handle.future.add_done_callback(lambda _: self._leave(row, handle))

    def _leave(self, row: _Row, result: Handle | RowError) -> None:
        with self._changed:
            self._left.append((row, result))
            self._inside -= 1
            self._changed.notify_all()

    def _outcome(self, row: _Row, result: Handle | RowError) -> RowOutcome:
        if isinstance(result, RowError):
            return RowOutcome(problem=vars(result.problem))
        try:
            return RowOutcome(generated=self._finish(result.result(), row.request))
        except (RequestTimeoutError, NotFiniteError) as error:
            kind: ProblemType = "TimedOut" if isinstance(error, RequestTimeoutError) else "NotFinite"
            return RowOutcome(problem=vars(RowError(kind, str(error), row.deaths + 1).problem))


def _longest(request: Request) -> int:
    """Return the most tokens of a request, prompt included."""
    return len(request.prompt_ids) + request.sampling.over().max_new_tokens

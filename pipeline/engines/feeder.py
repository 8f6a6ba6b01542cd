"""Rows into an engine: a few more than it has slots, long ones first, and those that may end its process alone.

The calls of an actor run at once, and their rows share the engine; one thread passes them in, after the ledger knows
of them. So the rows that the ledger holds for an engine are those that it is working on, or about to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from drafter.engine.handle import Handle
from drafter.errors import RequestError, RequestTimeoutError
from drafter.requests import Generation, Request
from pipeline.engines.ledger import Outcome, RowKey
from pipeline.errors import RowError

_PULSE_SECONDS = 0.01
"""While the engine is full, the ledger hears of several rows at once."""
_REPORT_SECONDS = 0.25


def places(slots: int) -> int:
    """Rows to keep in an engine: those that it decodes, and enough waiting that a slot is never empty for a pulse."""
    return slots + max(4, slots // 2)


def alone_from(row_attempts: int) -> int:
    """A row with so many deaths has the engine to itself.

    Most deaths are the machine's, so a first retry is in company. A row is set aside after its last two attempts
    alone: one death that has nothing to do with the row, in the moment that it is alone, does not condemn it.
    """
    return max(1, row_attempts - 2)


class RowLedger(Protocol):
    """What a feeder wants of the `Ledger`."""

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, Outcome], dict[str, int]]:
        """See `Ledger.open_part`."""

    def exchange(self, left: Mapping[RowKey, Outcome], entering: list[RowKey]) -> bool:
        """See `Ledger.exchange`."""


@dataclass
class _Row:
    key: RowKey
    request: Request
    deaths: int


@dataclass
class _Call:
    wanted: int
    outcomes: dict[str, Outcome]

    @property
    def done(self) -> bool:
        return len(self.outcomes) == self.wanted


class Feeder:
    """Passes rows into one engine.

    Args:
        submit: Into the engine.
        columns: What a finished request adds to its row.
        ledger: Is told of every row before the engine.
        slots: Of the engine.
        row_attempts: Deaths after which a row is set aside.
    """

    def __init__(
        self,
        submit: Callable[[Request], Handle],
        columns: Callable[[Generation, Request], dict[str, Any]],
        ledger: RowLedger,
        slots: int,
        row_attempts: int,
    ) -> None:
        self._submit, self._columns, self._ledger = submit, columns, ledger
        self._slots, self._places, self._alone_from = slots, places(slots), alone_from(row_attempts)
        self._company: deque[_Row] = deque()
        self._suspects: deque[_Row] = deque()
        self._calls: dict[str, _Call] = {}
        self._left: list[tuple[_Row, Handle | RowError]] = []
        self._inside = 0
        self._suspect_inside = self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def generate(
        self, part: str, requests: Mapping[str, Request], report: Callable[[Mapping[str, Outcome]], None]
    ) -> dict[str, Outcome]:
        """What came of a part's requests, by their names; safe from any thread.

        Args:
            part: Its name.
            requests: By `request_id`.
            report: Called now and then with what there is by then, and once with everything.

        Raises:
            Exception: The engine failed, or the ledger cannot be reached.
        """
        known, deaths = self._ledger.open_part(part, len(requests))
        call = _Call(len(requests), {name: known[name] for name in requests if name in known})
        rows = [
            _Row(RowKey(part, name), request, deaths.get(name, 0))
            for name, request in requests.items()
            if name not in known
        ]
        # What is long begins early and ends with the others; rows of a length also read about as much of the cache.
        rows.sort(key=lambda row: -_expected_length(row.request))
        with self._changed:
            self._calls[part] = call
            for row in rows:
                (self._suspects if row.deaths >= self._alone_from else self._company).append(row)
            self._changed.notify_all()
        done = False
        while not done:
            with self._changed:
                self._changed.wait_for(lambda: call.done or self._failure is not None, _REPORT_SECONDS)
                if self._failure is not None:
                    raise self._failure
                outcomes, done = dict(call.outcomes), call.done
            report(outcomes)
        del self._calls[part]
        return outcomes

    def _run(self) -> None:
        try:
            while True:
                self._pass_on()
        except Exception as error:  # whatever it is, the calls must hear of it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _pass_on(self) -> None:
        """Tell the ledger who leaves and who enters, then let them."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._may_enter())
            full = self._inside >= self._slots
        if full:
            time.sleep(_PULSE_SECONDS)
        with self._changed:
            left, self._left = self._left, []
            entering = self._take()
        outcomes = {row.key: self._outcome(row, came) for row, came in left}
        welcome = self._ledger.exchange(outcomes, [row.key for row in entering])
        with self._changed:
            for key, outcome in outcomes.items():
                self._calls[key.part].outcomes[key.request_id] = outcome
            self._closed = not welcome
            self._changed.notify_all()
        if welcome:
            for row in entering:
                self._enter(row)

    def _may_enter(self) -> int:
        """How many rows may enter now."""
        if self._closed or (self._suspect_inside and self._inside):
            return 0
        if self._suspects:
            return 1 if not self._inside else 0
        return min(self._places - self._inside, len(self._company))

    def _take(self) -> list[_Row]:
        """The rows that enter now, taken from where they wait."""
        count, waiting = self._may_enter(), self._suspects or self._company
        if count:
            self._suspect_inside = waiting is self._suspects
        self._inside += count
        return [waiting.popleft() for _ in range(count)]

    def _enter(self, row: _Row) -> None:
        try:
            handle = self._submit(row.request)
        except RequestError as error:
            self._leave(row, RowError("Refused", str(error), row.deaths + 1))
        else:
            handle.future.add_done_callback(lambda _: self._leave(row, handle))

    def _leave(self, row: _Row, came: Handle | RowError) -> None:
        with self._changed:
            self._left.append((row, came))
            self._inside -= 1
            self._changed.notify_all()

    def _outcome(self, row: _Row, came: Handle | RowError) -> Outcome:
        if isinstance(came, RowError):
            return Outcome(problem=vars(came.problem))
        try:
            return Outcome(generated=self._columns(came.result(), row.request))
        except RequestTimeoutError as error:
            return Outcome(problem=vars(RowError("TimedOut", str(error), row.deaths + 1).problem))


def _expected_length(request: Request) -> int:
    return len(request.prompt_ids) + request.sampling.max_new_tokens

"""What is in flight: rows in engines, finished rows of parts that are not committed, and the deaths under each row.

One small actor beside the driver keeps it, outside of every engine's process. A row is entered before an engine sees
it and leaves with its result, so whatever ends an engine's process, it is known which rows were in it, and those that
had finished are not generated again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import RowError

_HOPELESS = 20
"""An engine whose process ends so often without finishing one row is not the rows' fault: the machine's, or ours."""


@dataclass(frozen=True)
class Outcome:
    """What came of a row: one of the two.

    Args:
        generated: The columns that a finished row gets.
        problem: A `RowProblem`'s fields.
    """

    generated: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None


@dataclass(frozen=True)
class RowKey:
    """A row's place.

    Args:
        part: The part it belongs to.
        request_id: Its name.
    """

    part: str
    request_id: str


@dataclass
class PartRecord:
    """A part that is not committed.

    Args:
        wanted: Rows that an engine has to see; None before an engine has begun with the part.
        inside: Those that are in an engine now.
        outcomes: Those that have left it.
        deaths: How often a row's engine died with the row inside.
    """

    wanted: int | None = None
    inside: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)

    @property
    def complete(self) -> bool:
        """Whether all rows have left the engine; only the commit is missing."""
        return len(self.outcomes) == self.wanted


@dataclass(frozen=True)
class SavedRow:
    """What one submission tells the next of a row whose part is not committed.

    Args:
        part: See `RowKey`.
        request_id: See `RowKey`.
        generated: See `Outcome`.
        problem: See `Outcome`.
        deaths: See `PartRecord`.
    """

    part: str
    request_id: str
    generated: dict[str, Any] | None
    problem: dict[str, Any] | None
    deaths: int


@dataclass(frozen=True)
class LedgerCounts:
    """What happened in this submission.

    Args:
        inside: Rows that are in engines now.
        uncommitted: Parts whose rows have all finished and that are not committed.
        engine_deaths: Processes of engines that ended and were replaced.
        rows_again: Rows that entered an engine once more because it died.
    """

    inside: int
    uncommitted: int
    engine_deaths: int
    rows_again: int


class Ledger:
    """Keeps the record; a Ray actor, but nothing in it needs Ray.

    Args:
        row_attempts: A row that was in an engine at so many deaths is set aside: it gets an error for its outcome.
        saved: What an earlier submission left (`save`).
        base: Fingerprint of the base that an earlier submission generated with.
    """

    def __init__(self, row_attempts: int, saved: Sequence[SavedRow] = (), base: str | None = None) -> None:
        self._row_attempts = row_attempts
        self._parts: dict[str, PartRecord] = {}
        self._base = base
        self._open = True
        self._starts: Counter[str] = Counter()
        self._engine_deaths = self._rows_again = 0
        for row in saved:
            record = self._parts.setdefault(row.part, PartRecord())
            if row.deaths:
                record.deaths[row.request_id] = row.deaths
            if row.generated is not None or row.problem is not None:
                record.outcomes[row.request_id] = Outcome(row.generated, row.problem)

    def arrive(self, engine: str) -> bool:
        """An engine's process begins.

        Args:
            engine: The same name for every process that replaces a dead one.

        Returns:
            Whether to go on: not after `_HOPELESS` processes without one finished row.
        """
        self._engine_deaths += engine in self._starts
        self._starts[engine] += 1
        return self._starts[engine] <= _HOPELESS

    def loaded(self, base: str) -> str:
        """An engine has loaded a base with this fingerprint; returns that of the first one, which all must have."""
        self._base = self._base or base
        return self._base

    def has_loaded(self) -> bool:
        """Whether any engine has loaded its models, so that they can be."""
        return self._base is not None

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, Outcome], dict[str, int]]:
        """An engine begins with a part, or begins again: then the process that had it before has died.

        Returns:
            The outcomes that are there already, set-aside rows' included, and the deaths under each row that had any.
        """
        record = self._parts.setdefault(part, PartRecord())
        record.wanted = wanted
        record.deaths.update(record.inside)
        self._rows_again += len(record.inside)
        record.inside.clear()
        for request_id, deaths in record.deaths.items():
            if deaths >= self._row_attempts:
                record.outcomes.setdefault(request_id, Outcome(problem=vars(_set_aside(deaths).problem)))
        return record.outcomes, dict(record.deaths)

    def exchange(self, engine: str, left: Mapping[RowKey, Outcome], entering: Iterable[RowKey]) -> bool:
        """Rows leave an engine, and others are about to enter it.

        Returns:
            Whether they may: not any more when the job is being stopped.
        """
        for key, outcome in left.items():
            record = self._parts.setdefault(key.part, PartRecord())
            record.inside.discard(key.request_id)
            record.outcomes[key.request_id] = outcome
            self._starts[engine] = 1
        if self._open:
            for key in entering:
                self._parts.setdefault(key.part, PartRecord()).inside.add(key.request_id)
        return self._open

    def commit(self, part: str) -> None:
        """A part is in the output: nothing need be known of it any more."""
        self._parts.pop(part, None)

    def drain(self) -> None:
        """Let no more rows into engines."""
        self._open = False

    def counts(self) -> LedgerCounts:
        """How things stand."""
        records = self._parts.values()
        return LedgerCounts(
            inside=sum(len(record.inside) for record in records),
            uncommitted=sum(record.complete for record in records),
            engine_deaths=self._engine_deaths,
            rows_again=self._rows_again,
        )

    def save(self) -> list[SavedRow]:
        """All that the next submission can use; that rows are inside an engine now is no death."""
        return [
            SavedRow(part, name, outcome.generated, outcome.problem, record.deaths[name])
            for part, record in self._parts.items()
            for name in record.outcomes.keys() | record.deaths.keys()
            for outcome in [record.outcomes.get(name, Outcome())]
        ]


def _set_aside(deaths: int) -> RowError:
    return RowError("EngineDied", f"its engine's process ended {deaths} times with it, at last with it alone", deaths)

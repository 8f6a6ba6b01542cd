"""The ledger: rows inside engines, outcomes of finished rows, and deaths of engines with a row inside.

It is an actor outside of all engine processes. A row is entered before an engine sees it and its outcome when it
leaves, so if an engine's process ends, the rows inside are known and finished rows are not generated again. A part's
entries are dropped once the part is committed, all but its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray

from pipeline.command_line import say
from pipeline.errors import JobError, RowProblem
from pipeline.io.files import parquet_rows
from pipeline.output.folder import OutputFolder
from pipeline.output.summary import is_valid

_HOPELESS = 20  # engine processes without a finished row; then the machine or this program is at fault, not a row


@dataclass(frozen=True)
class RowOutcome:
    """The outcome of a row: one of the two is set. `problem` has the fields of a `RowProblem`."""

    generated: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None

    @property
    def valid(self) -> bool:
        return self.generated is not None and is_valid(self.generated.get("valid"), self.generated["finish_reason"])


@dataclass(frozen=True)
class RowKey:
    part: str
    request_id: str


@dataclass
class PartRecord:
    """An uncommitted part."""

    wanted: int | None = None  # number of rows that engines must process; None before an engine began the part
    inside: set[str] = field(default_factory=set)
    outcomes: dict[str, RowOutcome] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)  # of engines, with the row inside

    @property
    def complete(self) -> bool:
        """True if all rows have an outcome, so that only the commit is missing."""
        return len(self.outcomes) == self.wanted


@dataclass(frozen=True)
class SavedRow:
    """A row of an uncommitted part, saved for the next submission. See `RowOutcome` and `PartRecord`."""

    part: str
    request_id: str
    generated: dict[str, Any] | None
    problem: dict[str, Any] | None
    deaths: int


@dataclass(frozen=True)
class LedgerCounts:
    inside: int
    uncommitted: int  # complete parts that are not yet committed
    engine_deaths: int
    rows_again: int  # rows inside an engine at its death, which are generated again
    enough: bool = False  # as many rows are valid as the job wants


class EnoughRowsError(JobError):
    """As many rows are valid as the job wants: engines end, and the driver commits what they have finished."""


ROW_ATTEMPTS = 4
"""A row that was in an engine at so many deaths of its process gets an error."""
ALONE_FROM = 2
"""Deaths from which a row has the engine to itself.

Most deaths are the machine's fault, so a row is first retried in company. Its last two attempts are alone, so that
one unrelated death at such a moment does not condemn it.
"""


class Ledger:
    """Keeps the record. Run as a Ray actor, but independent of Ray.

    Args:
        base: An earlier submission's fingerprint of the target model.
        wanted: Valid rows that are wanted beside those of committed parts; None for any number.
    """

    def __init__(self, saved: Sequence[SavedRow] = (), base: str | None = None, wanted: int | None = None) -> None:
        self._parts: dict[str, PartRecord] = {}
        self._committed: dict[str, None] = {}  # in the order of commits
        self._base = base
        self._open = True
        self._starts: Counter[str] = Counter()
        self._engine_deaths = self._rows_again = 0
        for row in saved:
            record = self._parts.setdefault(row.part, PartRecord())
            if row.deaths:
                record.deaths[row.request_id] = row.deaths
            if row.generated is not None or row.problem is not None:
                record.outcomes[row.request_id] = RowOutcome(row.generated, row.problem)
        self._wanted = wanted
        if wanted is not None:
            self._wanted = wanted - sum(one.valid for part in self._parts.values() for one in part.outcomes.values())

    @property
    def _enough(self) -> bool:
        return self._wanted is not None and self._wanted <= 0

    def _refuse_more(self) -> None:
        if self._enough:
            raise EnoughRowsError("as many rows are valid as are wanted")

    def arrive(self, engine: str) -> bool:
        """Record the start of an engine's process, and return whether it may go on. A replacement has the same name."""
        self._engine_deaths += engine in self._starts
        self._starts[engine] += 1
        return self._starts[engine] <= _HOPELESS

    def loaded(self, base: str) -> str:
        """Record the fingerprint of an engine's target model, and return the first one, which all must have."""
        self._base = self._base or base
        return self._base

    def has_loaded(self) -> bool:
        """Return whether any engine has loaded its models, so that they can be loaded."""
        return self._base is not None

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        """Record that an engine begins a part, a second time if the first died. Return outcomes, and deaths by row.

        Raises:
            EnoughRowsError: No more rows are wanted.
        """
        self._refuse_more()
        record = self._parts.setdefault(part, PartRecord())
        record.wanted = wanted
        record.deaths.update(record.inside)
        self._rows_again += len(record.inside)
        record.inside.clear()
        for request_id, deaths in record.deaths.items():
            if deaths >= ROW_ATTEMPTS:
                record.outcomes.setdefault(request_id, RowOutcome(problem=vars(_too_many_deaths(deaths))))
        return record.outcomes, dict(record.deaths)

    def exchange(self, engine: str, left: Mapping[RowKey, RowOutcome], entering: Iterable[RowKey]) -> bool:
        """Record rows that leave an engine and enter it; return False if none may enter, because the job stops.

        Raises:
            EnoughRowsError: No more rows are wanted; those that left after the last of them are not recorded.
        """
        for key, outcome in left.items():
            self._refuse_more()
            if self._wanted is not None:
                self._wanted -= outcome.valid
            record = self._parts.setdefault(key.part, PartRecord())
            record.inside.discard(key.request_id)
            record.outcomes[key.request_id] = outcome
            self._starts[engine] = 1
        self._refuse_more()
        if self._open:
            for key in entering:
                self._parts.setdefault(key.part, PartRecord()).inside.add(key.request_id)
        return self._open

    def commit(self, part: str) -> None:
        self._parts.pop(part, None)
        self._committed[part] = None

    def committed(self, number: int) -> list[str]:
        """Return the parts that were committed after the first `number` of them, in that order."""
        return list(self._committed)[number:]

    def is_committed(self, part: str) -> bool:
        """Return whether a part is written for good: Ray may give it to the next engine after one that has ended."""
        return part in self._committed

    def drain(self) -> None:
        self._open = False

    def counts(self) -> LedgerCounts:
        records = self._parts.values()
        return LedgerCounts(
            inside=sum(len(record.inside) for record in records),
            uncommitted=sum(record.complete for record in records),
            engine_deaths=self._engine_deaths,
            rows_again=self._rows_again,
            enough=self._enough,
        )

    def save(self) -> list[SavedRow]:
        """Return the rows that the next submission can use. Rows inside an engine now count no death."""
        return [
            SavedRow(part, name, outcome.generated, outcome.problem, record.deaths[name])
            for part, record in self._parts.items()
            for name in record.outcomes.keys() | record.deaths.keys()
            for outcome in [record.outcomes.get(name, RowOutcome())]
        ]


def _too_many_deaths(deaths: int) -> RowProblem:
    message = f"its engine's process ended {deaths} times with it, at last with it alone"
    return RowProblem("EngineDied", message, attempts=deaths)


class RemoteLedger:
    """Client of the `Ledger` actor for this process's engine; calls wait for the answer."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        # A process that replaces a dead one has the same actor id.
        self._engine = ray.get_runtime_context().get_actor_id()

    def arrive(self) -> bool:
        return bool(ray.get(self._actor.arrive.remote(self._engine)))

    def loaded(self, base: str) -> str:
        return str(ray.get(self._actor.loaded.remote(base)))

    def has_loaded(self) -> bool:
        return bool(ray.get(self._actor.has_loaded.remote()))

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        outcomes, deaths = ray.get(self._actor.open_part.remote(part, wanted))
        return outcomes, deaths

    def commit(self, part: str) -> None:
        """Forget the rows of a part that is written for good; the one call that waits for no answer."""
        self._actor.commit.remote(part)

    def is_committed(self, part: str) -> bool:
        return bool(ray.get(self._actor.is_committed.remote(part)))

    def exchange(self, left: Mapping[RowKey, RowOutcome], entering: list[RowKey]) -> bool:
        return bool(ray.get(self._actor.exchange.remote(self._engine, left, entering)))


def read_unfinished(output: OutputFolder) -> list[SavedRow]:
    """Read an earlier submission's finished rows of uncommitted parts; none, with a message, if the file is damaged."""
    if not output.unfinished.exists:
        return []
    if parquet_rows(output.unfinished) is None:
        say(f"{output.unfinished.path} is damaged: its rows are generated again")
        return []
    return [SavedRow(**row) for row in output.unfinished.read_parquet().to_pylist()]


def write_unfinished(output: OutputFolder, rows: list[SavedRow]) -> None:
    """Save rows for the next submission, replacing earlier ones. Without rows there is no file."""
    if not rows:
        output.unfinished.delete()
        return
    table = pa.Table.from_pylist([vars(row) for row in rows])
    output.unfinished.write_parquet(table, aside=output.temporary / output.unfinished.name)

"""The ledger: which rows are in engines, what came of finished rows, and how often an engine died with a row inside.

One small actor on the driver's node keeps it, outside of every engine's process. It notes a row before an engine sees
the row, and the row's outcome when it leaves. So whatever ends an engine's process, it is known which rows were inside,
and rows that had finished are not generated again. Entries of a part are dropped when the part is committed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import ray
from pyarrow import fs

from pipeline.errors import RowError
from pipeline.io.reading import parquet_rows
from pipeline.output.folder import OutputFolder

_HOPELESS = 20
"""If an engine's process ends this often without finishing one row, the machine or this program is at fault, no row."""


@dataclass(frozen=True)
class RowOutcome:
    """What came of a row: one of the two.

    Args:
        generated: Values of the output columns.
        problem: Fields of a `RowProblem`.
    """

    generated: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None


@dataclass(frozen=True)
class RowKey:
    """A row's key in the ledger.

    Args:
        part: The part that it belongs to.
        request_id: Its name.
    """

    part: str
    request_id: str


@dataclass
class PartRecord:
    """A part that is not committed.

    Args:
        wanted: Number of rows that an engine has to see; None before an engine has begun with the part.
        inside: Rows that are in an engine now.
        outcomes: Outcomes of the rows that have left it.
        deaths: How often an engine died with a row inside.
    """

    wanted: int | None = None
    inside: set[str] = field(default_factory=set)
    outcomes: dict[str, RowOutcome] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)

    @property
    def complete(self) -> bool:
        """Whether all rows have an outcome, so that only the commit is missing."""
        return len(self.outcomes) == self.wanted


@dataclass(frozen=True)
class SavedRow:
    """What one submission tells the next about a row whose part is not committed.

    Args:
        part: See `RowKey`.
        request_id: See `RowKey`.
        generated: See `RowOutcome`.
        problem: See `RowOutcome`.
        deaths: See `PartRecord`.
    """

    part: str
    request_id: str
    generated: dict[str, Any] | None
    problem: dict[str, Any] | None
    deaths: int


@dataclass(frozen=True)
class LedgerCounts:
    """How things stand in this submission.

    Args:
        inside: Rows that are in engines now.
        uncommitted: Parts that are not committed although all of their rows have an outcome.
        engine_deaths: Processes of engines that ended and were replaced.
        rows_again: Rows that were inside an engine when it died, and have to be generated again.
    """

    inside: int
    uncommitted: int
    engine_deaths: int
    rows_again: int


class Ledger:
    """Keeps the record; a Ray actor, but nothing in it needs Ray.

    Args:
        row_attempts: A row that was in an engine at this many deaths is set aside: its outcome is an error.
        saved: What an earlier submission left, by `save`.
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
                record.outcomes[row.request_id] = RowOutcome(row.generated, row.problem)

    def arrive(self, engine: str) -> bool:
        """Note that an engine's process begins.

        Args:
            engine: Its name; a process that replaces a dead one has the same.

        Returns:
            Whether the process shall go on: not after `_HOPELESS` processes without one finished row.
        """
        self._engine_deaths += engine in self._starts
        self._starts[engine] += 1
        return self._starts[engine] <= _HOPELESS

    def loaded(self, base: str) -> str:
        """Note the fingerprint of the base that an engine has loaded, and return the first one, which all must have."""
        self._base = self._base or base
        return self._base

    def has_loaded(self) -> bool:
        """Return whether any engine has loaded its models, which proves that they can be loaded."""
        return self._base is not None

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        """Note that an engine begins with a part; if another had begun with it, that one's process has died.

        Returns:
            The outcomes that are there already, those of rows set aside included, and how often an engine died with
            each row, where it did.
        """
        record = self._parts.setdefault(part, PartRecord())
        record.wanted = wanted
        record.deaths.update(record.inside)
        self._rows_again += len(record.inside)
        record.inside.clear()
        for request_id, deaths in record.deaths.items():
            if deaths >= self._row_attempts:
                record.outcomes.setdefault(request_id, RowOutcome(problem=vars(_too_many_deaths(deaths).problem)))
        return record.outcomes, dict(record.deaths)

    def exchange(self, engine: str, left: Mapping[RowKey, RowOutcome], entering: Iterable[RowKey]) -> bool:
        """Note that rows leave an engine and that others are about to enter it.

        Returns:
            Whether they may enter: not when the job is being stopped.
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
        """Forget a part, because it is in the output."""
        self._parts.pop(part, None)

    def drain(self) -> None:
        """Let no more rows into engines."""
        self._open = False

    def counts(self) -> LedgerCounts:
        """Return how things stand."""
        records = self._parts.values()
        return LedgerCounts(
            inside=sum(len(record.inside) for record in records),
            uncommitted=sum(record.complete for record in records),
            engine_deaths=self._engine_deaths,
            rows_again=self._rows_again,
        )

    def save(self) -> list[SavedRow]:
        """Return all that the next submission can use. Rows that are inside an engine now count no death."""
        return [
            SavedRow(part, name, outcome.generated, outcome.problem, record.deaths[name])
            for part, record in self._parts.items()
            for name in record.outcomes.keys() | record.deaths.keys()
            for outcome in [record.outcomes.get(name, RowOutcome())]
        ]


def _too_many_deaths(deaths: int) -> RowError:
    return RowError("EngineDied", f"its engine's process ended {deaths} times with it, at last with it alone", deaths)


# ---- The ledger, as an engine's process sees it.


class RemoteLedger:
    """Calls the `Ledger` actor in the name of this process's engine and waits for its answers.

    Args:
        actor: A `Ledger` actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        # A process that replaces a dead one has the same actor id.
        self._engine = ray.get_runtime_context().get_actor_id()

    def arrive(self) -> bool:
        """See `Ledger.arrive`."""
        return bool(ray.get(self._actor.arrive.remote(self._engine)))

    def loaded(self, base: str) -> str:
        """See `Ledger.loaded`."""
        return str(ray.get(self._actor.loaded.remote(base)))

    def has_loaded(self) -> bool:
        """See `Ledger.has_loaded`."""
        return bool(ray.get(self._actor.has_loaded.remote()))

    def open_part(self, part: str, wanted: int) -> tuple[dict[str, RowOutcome], dict[str, int]]:
        """See `Ledger.open_part`."""
        outcomes, deaths = ray.get(self._actor.open_part.remote(part, wanted))
        return outcomes, deaths

    def exchange(self, left: Mapping[RowKey, RowOutcome], entering: list[RowKey]) -> bool:
        """See `Ledger.exchange`."""
        return bool(ray.get(self._actor.exchange.remote(self._engine, left, entering)))


# ---- The rows that a submission leaves to the next: they are finished, but their parts are not.


def read_unfinished(output: OutputFolder) -> list[SavedRow]:
    """Read what an earlier submission left; nothing, and a line that says so, where the file is damaged."""
    if output.unfinished.type != fs.FileType.File:
        return []
    if parquet_rows(output.unfinished) is None:
        print(f"{output.unfinished.path} is damaged: its rows are generated again", file=sys.stderr, flush=True)
        return []
    table = pa.parquet.read_table(output.unfinished.path, filesystem=output.root.filesystem)
    return [SavedRow(**row) for row in table.to_pylist()]


def write_unfinished(output: OutputFolder, rows: list[SavedRow]) -> None:
    """Leave these rows to the next submission, instead of those that are there; no rows leave no file."""
    if not rows:
        delete_unfinished(output)
        return
    with output.unfinished.open_whole(aside=output.temporary / output.unfinished.name) as stream:
        pa.parquet.write_table(pa.Table.from_pylist([vars(row) for row in rows]), stream)


def delete_unfinished(output: OutputFolder) -> None:
    """Leave nothing to the next submission."""
    if output.unfinished.type == fs.FileType.File:
        output.unfinished.filesystem.delete_file(output.unfinished.path)

"""What the folder of batches keeps of files and batches: small JSON files, and OpenAI's objects made of them."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from drafter.json_fields import from_json
from pipeline.io.files import locate, sync
from pipeline.openai.errors import OpenAIError

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
_ABOUT, _CONTENT = "about.json", "content"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


@dataclass(frozen=True)
class FileRecord:
    """A file; `owner` is the client (see `Keys.client`) whose it is, and times are seconds since 1970."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int

    def public(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        given = {name: value for name, value in asdict(self).items() if name != "owner"}
        return given | {"object": "file", "status": "processed", "expires_at": None, "status_details": None}


@dataclass(frozen=True)
class Problem:
    """Why a batch cannot be run, or does not get on; `line` is that of its input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass
class Counts:
    """Of the requests of a batch, and of the tokens of those that were answered."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class BatchRecord:
    """A batch; see `FileRecord`. `times` are those at which it came to a status, by OpenAI's names of the fields."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[Problem] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def at(self, status: BatchStatus, now: float, **changes: Any) -> BatchRecord:
        """Return the batch as it comes to a status."""
        return replace(self, status=status, times={**self.times, f"{status}_at": int(now)}, **changes)

    def public(self, counts: Counts, trouble: Problem | None) -> dict[str, Any]:
        """Return OpenAI's object, with the counts and the trouble of the moment."""
        own = ["owner", "times", "counts", "errors"]
        if self.status not in ENDED:
            own += ["output_file_id", "error_file_id"]  # they are not written yet
        given = {name: value for name, value in asdict(self).items() if name not in own}
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        problems = [*self.errors, *([] if trouble is None else [trouble])]
        return {
            "output_file_id": None,
            "error_file_id": None,
            **given,
            "object": "batch",
            "errors": {"object": "list", "data": [asdict(one) for one in problems]} if problems else None,
            **{f"{state}_at": self.times.get(f"{state}_at") for state in states},
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "usage": {
                "input_tokens": counts.input_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens": counts.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.input_tokens + counts.output_tokens,
            },
        }


Record = TypeVar("Record", bound=FileRecord | BatchRecord)


class Shelf(Generic[Record]):
    """Records of one kind by their id, each in a folder of its own below `root`. What is in memory is on disk."""

    def __init__(self, root: Path, kind: type[Record], missing: str) -> None:
        self._root, self._kind, self._missing = root, kind, missing
        self._records: dict[str, Record] = {}

    def load(self) -> None:
        """Read all records; folders without one are those of what was begun and not done, and are removed."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._records = {}
        for folder in sorted(self._root.iterdir()):
            if (folder / _ABOUT).exists():
                about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
                self._records[folder.name] = from_json(self._kind, about)
            elif _ID.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, name: str) -> Path:
        return self._root / name

    def save(self, record: Record) -> None:
        """Write a record, whole or not at all. Raises `OSError`."""
        locate(str(self.folder(record.id) / _ABOUT)).write_text(json.dumps(vars(record), default=vars))
        self._records[record.id] = record

    def find(self, owner: str, name: str) -> Record:
        """Return an owner's record; raises `OpenAIError` (404) if there is none, or it is another one's."""
        record = self._records.get(name)
        if record is None or record.owner != owner:
            raise OpenAIError(404, self._missing.format(name[:100]), "id", "not_found")
        return record

    def forget(self, record: Record) -> None:
        """Delete a record with all that is in its folder, first the record itself."""
        self._records.pop(record.id, None)
        (self.folder(record.id) / _ABOUT).unlink(missing_ok=True)
        shutil.rmtree(self.folder(record.id), ignore_errors=True)

    def __iter__(self) -> Iterator[Record]:
        """Yield all, the oldest first."""
        return iter(sorted(self._records.values(), key=lambda one: one.id))

    def of(self, owner: str) -> list[Record]:
        return [one for one in self if one.owner == owner]


class FileShelf(Shelf[FileRecord]):
    """Files, each with its content."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, FileRecord, "No such File object: {}")

    def content(self, name: str) -> Path:
        return self.folder(name) / _CONTENT

    def keep(self, record: FileRecord) -> None:
        """Write the record of a file whose content is there. Raises `OSError`."""
        sync(locate(str(self.content(record.id))))
        self.save(record)

    def put(self, record: FileRecord, pieces: Iterable[bytes]) -> None:
        """Write a file and its record; one that was begun before under this id is written again. Raises `OSError`."""
        self.folder(record.id).mkdir(exist_ok=True)
        size = 0
        with self.content(record.id).open("wb") as stream:
            for piece in pieces:
                size += stream.write(piece)
        self.keep(replace(record, bytes=size))


def new_id(prefix: str, now: float) -> str:
    """Return an id that none can guess. Later ones are greater."""
    return f"{prefix}{int(now * 1e9):016x}{secrets.token_hex(8)}"


def page(records: Iterable[Record], *, limit: int, after: str | None, newest_first: bool) -> tuple[list[Record], bool]:
    """Return up to `limit` of an owner's records behind the one with the id `after`, and whether there are more."""
    found = list(records)[::-1] if newest_first else list(records)
    if after is not None:
        found = [one for one in found if (one.id < after if newest_first else one.id > after)]
    return found[:limit], len(found) > limit

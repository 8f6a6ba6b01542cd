"""`status.json` in the output: the job's progress, for programs and for people without its terminal.

The file is replaced atomically every few seconds and at the job's end; only a killed process leaves it at `generating`,
with an old `updated_at`. It also keeps each submission's resource use, from which `jobs.report` computes the cost.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.io.files import Location
from pipeline.output.summary import speculation_record
from pipeline.progress.board import Progress, ending

_WRITE_SECONDS = 5.0


class StatusFile:
    """Writes the file throughout a `with` block, which is one submission."""

    def __init__(self, file: Location) -> None:
        self._file = file
        self._begun = _now()
        self._earlier = submissions(file)
        self._resources: ActorResources | None = None
        self._now = Progress()
        self._written = 0.0
        self._warned = False

    def __enter__(self) -> StatusFile:
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None else one_line(error)
        self._now = replace(self._now, state=ending(error), failure=failure)
        self._write()

    def takes(self, resources: ActorResources) -> None:
        self._resources = resources

    def show(self, now: Progress) -> None:
        """Write the progress, if it is due or the state is new."""
        new = now.state != self._now.state
        self._now = now
        if new or time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            self._file.write_text(json.dumps(self._content(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:  # the job goes on without its status
            if not self._warned:
                print(f"{self._file.path} cannot be written: {one_line(error)}", file=sys.stderr, flush=True)
            self._warned = True

    def _content(self) -> dict[str, Any]:
        now = self._now
        eta = now.eta_seconds
        return {
            "state": now.state,
            "updated_at": _now(),
            "rows_total": now.total,
            "rows_done": now.done,
            "errors": now.errors_before + now.errors,
            "rows_per_second": round(now.rows_per_second, 3),
            "tokens_per_second": round(now.tokens_per_second, 1),
            "eta_seconds": None if eta is None else round(eta, 1),
            "mean_acceptance_length": round(now.acceptance_length, 4) if now.steps else None,
            "engines": now.engines,
            "slots": now.slots,
            "slots_active": now.active,
            "requests_waiting": now.waiting,
            "memory_tokens": now.memory_tokens,
            "memory_bytes": now.memory_bytes,
            "speculation": speculation_record(now.choices),
            "failure": now.failure,
            "last_crash": now.crash,
            **({} if now.learning is None else {"learning": asdict(now.learning)}),
            "submissions": [*self._earlier, self._submission()],
        }

    def _submission(self) -> dict[str, Any]:
        now, resources = self._now, self._resources
        return {
            "begun_at": self._begun,
            "rows": now.rows,
            "errors": now.errors,
            "tokens": now.tokens,
            "seconds": round(now.seconds, 3),
            "device": now.device,
            "engine_seconds": round(now.engine_seconds, 3),
            "gpu_seconds": round(now.engine_seconds * resources.gpus, 3) if resources else 0.0,
            "cpu_seconds": round(now.engine_seconds * resources.cpus, 3) if resources else 0.0,
        }


def submissions(file: Location) -> list[dict[str, Any]]:
    """Read the resource use of earlier submissions; none if there is no valid status file."""
    if file.type != fs.FileType.File:
        return []
    try:
        found = json.loads(file.read_text())["submissions"]
    except (ValueError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""Metrics of a run, as lines of JSON and for TensorBoard."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from pipeline.io.files import Location
from pipeline.training.training_folder import TrainingFolder

_FLUSH_SECONDS = 5.0

Record = dict[str, Any]
"""`step` and numbers by name. β is a dictionary: a number for each count of draft nodes."""


class MetricsLog:
    """Writes the metrics of a run. The whole file is written every few seconds, so no line is truncated or doubled.

    Args:
        folder: Output of the job.
        records: Records of the steps that were taken before; they come from the checkpoint that the run goes on from.

    Attributes:
        records: All records so far.

    Raises:
        OSError: A file cannot be written, for instance because the disk is full. All methods raise it.
    """

    def __init__(self, folder: TrainingFolder, records: Sequence[Record]) -> None:
        self._folder = folder
        self.records: list[Record] = []
        folder.events.filesystem.delete_dir_contents(folder.events.path, missing_dir_ok=True)
        # TensorBoard follows a growing file. Where files cannot be appended to, a local file grows and is copied.
        self._grows = isinstance(folder.events.filesystem, fs.LocalFileSystem)
        self._scratch = Path(folder.events.path if self._grows else tempfile.mkdtemp())
        # A full disk silently ends the thread of tensorboardX's SummaryWriter. This writer has no thread.
        self._events = EventsWriter(str(self._scratch / "events"))
        for record in records:
            self._put(record)
        self.flush()

    def add(self, record: Record) -> None:
        """Log a record."""
        self._put(record)
        if time.monotonic() - self._written >= _FLUSH_SECONDS:
            self.flush()

    def _put(self, record: Record) -> None:
        self.records.append(record)
        for name, value in _scalars(record):
            self._events.write_event(Event(wall_time=record["time"], step=record["step"], summary=scalar(name, value)))

    def flush(self) -> None:
        """Write all records."""
        self._folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        self._events.flush()
        if not self._grows:
            for file in self._scratch.iterdir():
                (self._folder.events / file.name).copy_from(file)
        self._written = time.monotonic()


def read_metrics(file: Location) -> list[Record]:
    """Return the records in a file that `MetricsLog` wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", one) for key, one in value.items())
        elif name not in ("step", "time"):
            yield name, value

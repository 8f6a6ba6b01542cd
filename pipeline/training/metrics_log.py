"""Metrics of a run: a line of JSON each, the same for TensorBoard, and a picture at the end."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
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
"""`step` and numbers by name; β is a number for each count of draft nodes."""


class MetricsLog:
    """The metrics of a run. Lines are written as a whole every few seconds, so that none is torn and no step is twice.

    Args:
        folder: Where they go.
        done: Steps taken before; what was logged after them will come again, and is forgotten.

    Raises:
        OSError: The disk is full, say; so do all methods.
    """

    def __init__(self, folder: TrainingFolder, done: int) -> None:
        self._folder = folder
        self._lines: list[str] = []
        before = [record for record in read_metrics(folder.metrics) if record["step"] <= done]
        folder.events.filesystem.delete_dir_contents(folder.events.path, missing_dir_ok=True)
        # TensorBoard follows a file that grows. Where files cannot grow, it grows here and is copied.
        self._grows = isinstance(folder.events.filesystem, fs.LocalFileSystem)
        self._scratch = Path(folder.events.path if self._grows else tempfile.mkdtemp())
        # tensorboardX's SummaryWriter has a thread that a full disk ends without a word; this has none.
        self._events = EventsWriter(str(self._scratch / "events"))
        for record in before:
            self._put(record)
        self.flush()

    def add(self, record: Record) -> None:
        """Log something."""
        self._put(record)
        if time.monotonic() - self._written >= _FLUSH_SECONDS:
            self.flush()

    def _put(self, record: Record) -> None:
        self._lines.append(json.dumps(record) + "\n")
        for name, value in _scalars(record):
            self._events.write_event(Event(wall_time=record["time"], step=record["step"], summary=scalar(name, value)))

    def flush(self) -> None:
        """Write what was logged."""
        self._folder.metrics.write_text("".join(self._lines))
        self._events.flush()
        if not self._grows:
            for file in self._scratch.iterdir():
                (self._folder.events / file.name).copy_from(file)
        self._written = time.monotonic()


def read_metrics(file: Location) -> list[Record]:
    """What was logged; nothing if there is no file."""
    if file.type != fs.FileType.File:
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", one) for key, one in value.items())
        elif name not in ("step", "time"):
            yield name, value

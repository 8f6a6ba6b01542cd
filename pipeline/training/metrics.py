"""Metrics of a run, as JSON lines, TensorBoard events and a plot."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pyarrow import fs
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from pipeline.io.files import Location
from pipeline.training.folder import TrainingFolder

_FLUSH_SECONDS = 5.0

Record = dict[str, Any]
"""`step` and numbers by name. β is a dictionary: a number for each count of draft tokens."""


class MetricsLog:
    """Writes the metrics of a run. The whole file is written every few seconds, so no line is truncated or doubled.

    A resumed run begins with the `records` of its checkpoint.

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
        self._put(record)
        if time.monotonic() - self._written >= _FLUSH_SECONDS:
            self.flush()

    def _put(self, record: Record) -> None:
        self.records.append(record)
        for name, value in _scalars(record):
            self._events.write_event(Event(wall_time=record["time"], step=record["step"], summary=scalar(name, value)))

    def flush(self) -> None:
        self._folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        self._events.flush()
        if not self._grows:
            for file in self._scratch.iterdir():
                (self._folder.events / file.name).copy_from(file)
        self._written = time.monotonic()


def read_metrics(file: Location) -> list[Record]:
    """Return the records in a file of `MetricsLog`."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", one) for key, one in value.items())
        elif name not in ("step", "time"):
            yield name, value


_SMOOTHING = 0.9


def plot_run(records: Sequence[Record], file: Path) -> None:
    """Plot the metrics of a run to a PNG file."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, beta_axes = figure.subplots(1, 2)
    steps = [record["step"] for record in records if "loss" in record]
    losses = [record["loss"] for record in records if "loss" in record]
    loss_axes.plot(steps, losses, linewidth=0.5, alpha=0.4)
    loss_axes.plot(steps, smoothed(losses), color="C0")
    loss_axes.set(xlabel="step", ylabel="loss (nats)", title="loss of a step, and its running mean")
    evaluated = [record for record in records if "beta" in record]
    for nodes in evaluated[0]["beta"] if evaluated else ():
        values = [record["beta"][nodes] for record in evaluated]
        beta_axes.plot([record["step"] for record in evaluated], values, marker="o", label=f"{nodes} nodes")
    if evaluated:
        beta_axes.legend()
    beta_axes.set(xlabel="step", ylabel="β", title="held-out β, simulated")
    figure.savefig(file, dpi=120, format="png")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, without bias at the start."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(total / weight)
    return result

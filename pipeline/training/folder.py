"""The output folder of a training job: the best head, and metrics as JSON lines, TensorBoard events and a plot."""

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

from drafter.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, save_head
from drafter.heads.contract import DraftHead
from drafter.heads.export import export_head
from drafter.heads.published import TargetOfExport
from pipeline.engines.models import tensor_spans
from pipeline.io.files import Location, make_folders
from pipeline.output.folder import LEASE_FILE, RUN_FILE

STAGED_TEXTS_LIST = "texts.json"
"""List of the staged texts. It is written last and completes the staging."""
_FLUSH_SECONDS = 5.0
_SMOOTHING = 0.9

Record = dict[str, Any]
"""`step` and numbers by name. β is a dictionary: a number for each count of draft tokens."""


class TrainingFolder:
    """Locations of a job's files under `root`, its output folder."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.head = root / "head"  # the head with the highest β so far
        self.exported = root / "export"  # the same in another project's layout
        self.metrics = root / "metrics.jsonl"
        self.events = root / "tensorboard"
        self.plot = root / "training.png"
        self.staged = root / "_staged"
        self.checkpoints = root / "_checkpoints"
        self.lease = root / LEASE_FILE
        self.run_file = root / RUN_FILE

    def create(self) -> None:
        """Create the folders.

        Raises:
            InputError: They cannot be created or written to.
        """
        make_folders(self.root, [self.head, self.events, self.staged, self.checkpoints], self.root)

    def has_results(self) -> bool:
        """Return whether a head or a checkpoint has been saved."""
        saved = any(info.type == fs.FileType.Directory for info in self.checkpoints.children())
        return saved or (self.head / WEIGHTS_FILE).exists

    def forget_job(self) -> None:
        """Delete the files of a job without results, except `run.json`."""
        self.staged.empty(first=STAGED_TEXTS_LIST)
        self.checkpoints.filesystem.delete_dir_contents(self.checkpoints.path, missing_dir_ok=True)

    def products(self) -> dict[str, int]:
        """Return the sizes in bytes of the user's files, by their names in the output."""
        found = [self.metrics.info, self.plot.info, *self.head.children(), *self.events.children()]
        files = [info for info in found if info.type == fs.FileType.File]
        return {info.path.removeprefix(f"{self.root.path}/"): info.size for info in files}

    def has_head(self) -> bool:
        """Return whether there is a head with undamaged files."""
        config, weights = self.head / CONFIG_FILE, self.head / WEIGHTS_FILE
        try:
            json.loads(config.read_text())
            with weights.filesystem.open_input_file(weights.path) as stream:
                tensor_spans(stream, stream.size())
        except (FileNotFoundError, ValueError):
            return False
        return True

    def save_head(self, head: DraftHead) -> None:
        """Replace the best head so far by `head`."""
        with tempfile.TemporaryDirectory() as name:
            save_head(head, name)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.head / file).copy_from(Path(name) / file)

    def export_head(self, base: TargetOfExport) -> None:
        """Write the best head to `exported`, in the layout that vLLM reads.

        Raises:
            InputError: The folder cannot be created.
            LoadError: The layout does not have this kind of head.
        """
        make_folders(self.root, [self.exported], self.root)
        with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.head / file).copy_to(Path(source) / file)
            export_head(Path(source), Path(target), base)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.exported / file).copy_from(Path(target) / file)

    def records(self) -> list[Record]:
        """Return the metrics that `MetricsLog` has written."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def draw(self) -> None:
        """Plot the metrics."""
        with self.plot.open_whole() as stream:
            _figure(self.records()).savefig(stream, dpi=120, format="png")


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


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", one) for key, one in value.items())
        elif name not in ("step", "time"):
            yield name, value


def _figure(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, beta_axes = figure.subplots(1, 2)
    steps = [record["step"] for record in records if "loss" in record]
    losses = [record["loss"] for record in records if "loss" in record]
    loss_axes.plot(steps, losses, linewidth=0.5, alpha=0.4)
    loss_axes.plot(steps, list(_smoothed(losses)), color="C0")
    loss_axes.set(xlabel="step", ylabel="loss (nats)", title="loss of a step, and its running mean")
    evaluated = [record for record in records if "beta" in record]
    for nodes in evaluated[0]["beta"] if evaluated else ():
        values = [record["beta"][nodes] for record in evaluated]
        beta_axes.plot([record["step"] for record in evaluated], values, marker="o", label=f"{nodes} nodes")
    if evaluated:
        beta_axes.legend()
    beta_axes.set(xlabel="step", ylabel="β", title="held-out β, simulated")
    return figure


def _smoothed(values: Sequence[float]) -> Iterator[float]:
    """Yield the exponential moving average, without bias at the start."""
    total = weight = 0.0
    for value in values:
        total = _SMOOTHING * total + value
        weight = _SMOOTHING * weight + 1
        yield total / weight

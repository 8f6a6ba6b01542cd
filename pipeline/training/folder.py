"""The output folder of a training job."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

from drafter.heads.checkpoint import export_head, save_head
from drafter.heads.config import CONFIG_FILE, WEIGHTS_FILE
from drafter.heads.contract import DraftHead
from drafter.heads.published import TargetOfExport
from pipeline.engines.models import tensor_spans
from pipeline.io.files import Location, make_folders
from pipeline.output.folder import LEASE_FILE, RUN_FILE

STAGED_TEXTS_LIST = "texts.json"
"""List of the staged texts. It is written last and completes the staging."""


@dataclass(frozen=True)
class TrainingFolder:
    """Locations of a job's files under `root`, its output folder."""

    root: Location

    @property
    def head(self) -> Location:
        """The head with the highest β so far."""
        return self.root / "head"

    @property
    def exported(self) -> Location:
        """The same head in another project's layout, if asked for."""
        return self.root / "export"

    @property
    def metrics(self) -> Location:
        """JSON lines: one for each logged step and each evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Location:
        """The same records for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def plot(self) -> Location:
        """Plot of loss and β over the steps."""
        return self.root / "training.png"

    @property
    def staged(self) -> Location:
        return self.root / "_staged"

    @property
    def checkpoints(self) -> Location:
        return self.root / "_checkpoints"

    @property
    def lease(self) -> Location:
        return self.root / LEASE_FILE

    @property
    def run_file(self) -> Location:
        return self.root / RUN_FILE

    def create(self) -> None:
        """Create the folders.

        Raises:
            InputError: They cannot be created or written to.
        """
        make_folders(self.root, [self.head, self.events, self.staged, self.checkpoints], self.root)

    def has_results(self) -> bool:
        """Return whether a head or a checkpoint has been saved."""
        saved = any(info.type == fs.FileType.Directory for info in self.checkpoints.children())
        return saved or (self.head / WEIGHTS_FILE).type == fs.FileType.File

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

    def export_head(self, base: TargetOfExport) -> None:
        """Write the best head to `exported`, in the layout that vLLM reads.

        Raises:
            InputError: The folder cannot be created.
            LoadError: The layout does not have this kind of head.
        """
        make_folders(self.root, [self.exported], self.root)
        with tempfile.TemporaryDirectory() as name:
            source, target = Path(name) / "head", Path(name) / "export"
            for folder in (source, target):
                folder.mkdir()
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                trained = self.head / file
                with trained.filesystem.open_input_file(trained.path) as stream:
                    (source / file).write_bytes(stream.read())
            export_head(source, target, base)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.exported / file).copy_from(target / file)

    def save_head(self, head: DraftHead) -> None:
        """Replace the best head so far by `head`."""
        with tempfile.TemporaryDirectory() as name:
            save_head(head, name)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.head / file).copy_from(Path(name) / file)

"""The folder of a training job."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from drafter.heads.checkpoint import save_head
from drafter.heads.contract import DraftHead
from drafter.heads.head_files import CONFIG_FILE, WEIGHTS_FILE
from pipeline.io.files import Location, make_folders
from pipeline.output.output_folder import RUN_FILE


@dataclass(frozen=True)
class TrainingFolder:
    """Where everything of a job is.

    Args:
        root: The output that was asked for.
    """

    root: Location

    @property
    def head(self) -> Location:
        """The head with the highest β so far."""
        return self.root / "head"

    @property
    def metrics(self) -> Location:
        """A line of JSON for each logged step and for each evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Location:
        """The same for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def plot(self) -> Location:
        """Loss and β over the steps."""
        return self.root / "training.png"

    @property
    def staged(self) -> Location:
        """The texts as the workers read them."""
        return self.root / "_staged"

    @property
    def checkpoints(self) -> Location:
        """What Ray Train keeps."""
        return self.root / "_checkpoints"

    @property
    def run_file(self) -> Location:
        """What was run."""
        return self.root / RUN_FILE

    def create(self) -> None:
        """Make the folders.

        Raises:
            InputError: They cannot be made or written to.
        """
        make_folders(self.root, [self.head, self.events, self.staged, self.checkpoints], self.root)

    def save_head(self, head: DraftHead) -> None:
        """Put `head` in place of the one that was the best before."""
        with tempfile.TemporaryDirectory() as name:
            save_head(head, name)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (self.head / file).copy_from(Path(name) / file)

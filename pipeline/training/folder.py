"""Output folder of a training job: the best head, metrics, and checkpoints without pickles."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray.train import Checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.errors import one_line
from drafter.heads.checkpoint import export_head, save_head
from drafter.heads.config import WEIGHTS_FILE
from drafter.heads.contract import DraftHead
from drafter.heads.published import TargetOfExport
from pipeline.io.files import Location, make_folders
from pipeline.output.folder import LEASE_FILE, RUN_FILE, check_head, fetch_head, put_head

STAGED_TEXTS_LIST = "texts.json"  # list of the staged texts. It is written last and completes the staging.
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of AdamW's moments of a parameter
_TENSORS = "state.safetensors"
_PROGRESS = "progress.json"
_WEIGHTS = "weights"
_SNAPSHOT = "checkpoint_manager_snapshot.json"

Record = dict[str, Any]  # `step` and numbers by name. β is a dictionary: a number for each count of draft tokens.


class TrainingFolder:
    """Locations of a job's files under `root`, its output folder."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.head = root / "head"  # the head with the highest β so far
        self.exported = root / "export"  # the same in another project's layout
        self.metrics = root / "metrics.jsonl"
        self.events = root / "tensorboard"
        self.staged = root / "_staged"
        self.checkpoints = root / "_checkpoints"
        self.lease = root / LEASE_FILE
        self.run_file = root / RUN_FILE

    def create(self) -> None:
        """Create the folders; raise `InputError` if that fails."""
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
        found = [self.metrics.info, *self.head.children(), *self.events.children()]
        files = [info for info in found if info.type == fs.FileType.File]
        return {info.path.removeprefix(f"{self.root.path}/"): info.size for info in files}

    def has_head(self) -> bool:
        """Return whether there is a head with undamaged files."""
        try:
            check_head(self.head)
        except (FileNotFoundError, ValueError):
            return False
        return True

    def save_head(self, head: DraftHead) -> None:
        with tempfile.TemporaryDirectory() as name:
            save_head(head, name)
            put_head(Path(name), self.head)

    def export_head(self, base: TargetOfExport) -> None:
        """Write the best head to `exported`, in the layout that vLLM reads.

        Raises `InputError` if the folder cannot be created, and `LoadError` if the layout lacks this kind of head.
        """
        make_folders(self.root, [self.exported], self.root)
        with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
            fetch_head(self.head, Path(source))
            export_head(Path(source), Path(target), base)
            put_head(Path(target), self.exported)

    def records(self) -> list[Record]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]


@dataclass(frozen=True)
class SavedRun:
    """A run after `steps` steps, gathered from all workers, on the CPU."""

    steps: int
    weights: dict[str, Tensor]  # by name, in float32, the draft vocabulary included
    moments: dict[str, dict[str, Tensor]]  # AdamW's, by name of the moment and of the parameter
    records: list[Record] = field(default_factory=list)


def write_checkpoint(saved: SavedRun, folder: Path) -> None:
    groups = {_WEIGHTS: saved.weights, **saved.moments}
    tensors = {f"{group}/{name}": value for group, some in groups.items() for name, value in some.items()}
    save_file(tensors, folder / _TENSORS)
    (folder / _PROGRESS).write_text(json.dumps({"steps": saved.steps, "records": saved.records}))


def read_checkpoint(folder: Path) -> SavedRun:
    """Read a local checkpoint; raise `SafetensorError`, `ValueError` or `KeyError` if it is damaged."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in load_file(folder / _TENSORS).items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = value
    progress = json.loads((folder / _PROGRESS).read_text())
    moments = {moment: groups[moment] for moment in MOMENTS}
    return SavedRun(progress["steps"], groups[_WEIGHTS], moments, progress["records"])


def upload(local: Path, target: Location) -> Checkpoint:
    """Copy a checkpoint to `target`. The small progress file comes last and makes it complete."""
    target.make_folder()
    for name in (_TENSORS, _PROGRESS):
        (target / name).copy_from(local / name)
    return Checkpoint(target.path, target.filesystem)


def restore(
    folder: Location, is_first: bool, agree: Callable[[str | None], str | None], show: Callable[[str], object]
) -> SavedRun | None:
    """Return the run of the newest readable checkpoint; None for a new run.

    The first worker chooses, and `agree` broadcasts its argument to all.
    """
    saved, chosen = None, None
    for name in reversed(complete_checkpoints(folder)) if is_first else ():
        try:
            saved, chosen = _load(folder / name), name
        except (FileNotFoundError, SafetensorError, ValueError, KeyError) as error:
            show(f"checkpoint {name} is damaged and left out: {one_line(error, 200)}")
        else:
            break
    chosen = agree(chosen)
    if saved is None and chosen is not None:
        saved = _load(folder / chosen)
    return saved


def _load(folder: Location) -> SavedRun:
    with Checkpoint(folder.path, folder.filesystem).as_directory() as local:
        return read_checkpoint(Path(local))


def complete_checkpoints(folder: Location) -> list[str]:
    """Return the names of the complete checkpoints in a folder, oldest first."""
    names = [info.base_name for info in folder.children()]
    return sorted(name for name in names if (folder / name / _PROGRESS).exists)


def tidy(folder: Location, kept: int) -> None:
    """Delete all but the `kept` newest checkpoints, and Ray Train's list of them, before another submission.

    Ray refuses to start with a list that is truncated, that another release of Ray wrote, or that names a missing
    checkpoint. It deletes only what is on its list, so older checkpoints are deleted here.
    """
    (folder / _SNAPSHOT).delete()
    for name in complete_checkpoints(folder)[:-kept]:
        _delete(folder / name)


def go_back(folder: Location, chosen_by: str) -> int | None:
    """Delete the checkpoints from the best head's step on, so that training makes a damaged best head again.

    Return that step, of the highest β at `chosen_by` draft tokens; None if no checkpoint has an evaluation.
    """
    for name in reversed(complete_checkpoints(folder)):
        try:
            records = json.loads((folder / name / _PROGRESS).read_text())["records"]
        except (ValueError, KeyError, TypeError):
            continue
        betas = [(record["beta"][chosen_by], record["step"]) for record in records if "beta" in record]
        if not betas:
            return None
        _, best = max(betas)
        for one in complete_checkpoints(folder):
            if one >= checkpoint_name(best):
                _delete(folder / one)
        return int(best)
    return None


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint; names sort as the steps do."""
    return f"step-{step:08d}"


def _delete(checkpoint: Location) -> None:
    # The completing file goes first, so that an interrupted deletion leaves no seemingly complete checkpoint.
    checkpoint.filesystem.delete_file((checkpoint / _PROGRESS).path)
    checkpoint.filesystem.delete_dir(checkpoint.path)

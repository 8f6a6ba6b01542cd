"""Checkpoints: the head's weights, AdamW's moments and the evaluations, as safetensors and JSON without pickles.

They depend neither on the number of workers nor on the ZeRO stage. Ray Train uploads them in the background, keeps the
newest ones, and returns the last one after a worker or the whole job has died.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from pyarrow import fs
from ray.train import Checkpoint, CheckpointUploadMode
from safetensors.torch import load_file, save_file

from pipeline.io.files import Location
from pipeline.training.training_board import refusals
from pipeline.training.workers.training_state import MOMENTS, TrainingState

_TENSORS = "state.safetensors"
_PROGRESS = "progress.json"
_WEIGHTS = "weights"
_SNAPSHOT = "checkpoint_manager_snapshot.json"


@dataclass(frozen=True)
class SavedRun:
    """A run between two steps.

    Args:
        state: Everything that a step changes.
        evaluations: `step` and `beta` of each evaluation so far.
    """

    state: TrainingState
    evaluations: list[dict[str, Any]]


def report(saved: SavedRun | None, step: int, folder: Location, board: Any) -> None:
    """Give a checkpoint to Ray Train, which uploads it while training goes on. Every worker calls this.

    Args:
        saved: The run on the first worker; None on the others.
        step: Number of steps taken.
        folder: Where checkpoints are kept.
        board: A `TrainingBoard` actor, which is told if the disk is full.
    """

    def keep(made: Checkpoint, name: str) -> Checkpoint:
        with refusals(board):
            return upload(Path(made.path), folder / name)

    checkpoint = None
    if saved is not None:
        local = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        write(saved, local)
        checkpoint = Checkpoint.from_directory(local)
    ray.train.report(
        {"step": step},
        checkpoint,
        checkpoint_dir_name=f"step-{step:08d}",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=keep,
    )


def write(saved: SavedRun, folder: Path) -> None:
    """Write a checkpoint to a local folder."""
    groups = {_WEIGHTS: saved.state.weights, **saved.state.moments}
    tensors = {f"{group}/{name}": value for group, some in groups.items() for name, value in some.items()}
    save_file(tensors, folder / _TENSORS)
    progress = {"steps": saved.state.steps, "evaluations": saved.evaluations}
    (folder / _PROGRESS).write_text(json.dumps(progress))


def read(folder: Path) -> SavedRun:
    """Read what `write` wrote."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in load_file(folder / _TENSORS).items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = value
    progress = json.loads((folder / _PROGRESS).read_text())
    state = TrainingState(progress["steps"], groups[_WEIGHTS], {moment: groups[moment] for moment in MOMENTS})
    return SavedRun(state, progress["evaluations"])


def upload(local: Path, target: Location) -> Checkpoint:
    """Copy a checkpoint to where it is kept. The small progress file comes last and makes it complete."""
    target.filesystem.create_dir(target.path, recursive=True)
    for name in (_TENSORS, _PROGRESS):
        (target / name).copy_from(local / name)
    return Checkpoint(target.path, target.filesystem)


def restore(folder: Location) -> SavedRun | None:
    """Return the run to go on with; None for a new run."""
    # Ray Train's own list does not name a checkpoint whose upload ended just before the job was killed.
    checkpoint = newest(folder)
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as local:
        return read(Path(local))


def newest(folder: Location) -> Checkpoint | None:
    """Return the last complete checkpoint in a folder."""
    made = (folder / info.path.rpartition("/")[2] for info in folder.children())
    complete = [one.path for one in made if (one / _PROGRESS).type == fs.FileType.File]
    return Checkpoint(max(complete), folder.filesystem) if complete else None


def forget_torn_list(folder: Location) -> None:
    """Delete Ray Train's list of checkpoints if it is truncated: Ray refuses to start with such a list."""
    listed = folder / _SNAPSHOT
    if listed.type != fs.FileType.File:
        return
    try:
        json.loads(listed.read_text())
    except ValueError:
        listed.filesystem.delete_file(listed.path)

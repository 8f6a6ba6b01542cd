"""Checkpoints of a training run: weights, AdamW's moments and metrics, as safetensors and JSON without pickles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.train import Checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.errors import one_line
from pipeline.io.files import Location
from pipeline.training.folder import Record

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments of a parameter."""
_TENSORS = "state.safetensors"
_PROGRESS = "progress.json"
_WEIGHTS = "weights"
_SNAPSHOT = "checkpoint_manager_snapshot.json"


@dataclass(frozen=True)
class SavedRun:
    """A run after `steps` steps, gathered from all workers.

    Args:
        weights: The head's weights by name, in float32, and its draft vocabulary, on the CPU.
        moments: AdamW's moments by name of the moment and name of the parameter.
        records: The metrics so far.
    """

    steps: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    records: list[Record] = field(default_factory=list)


def write(saved: SavedRun, folder: Path) -> None:
    groups = {_WEIGHTS: saved.weights, **saved.moments}
    tensors = {f"{group}/{name}": value for group, some in groups.items() for name, value in some.items()}
    save_file(tensors, folder / _TENSORS)
    (folder / _PROGRESS).write_text(json.dumps({"steps": saved.steps, "records": saved.records}))


def read(folder: Path) -> SavedRun:
    """Read a checkpoint from a local folder.

    Raises:
        SafetensorError, ValueError, KeyError: A file is damaged.
    """
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
    """Return the run of the newest readable checkpoint, the same on all workers; None for a new run.

    Args:
        is_first: Whether this is the first worker, which chooses.
        agree: Broadcasts the first worker's argument to all workers.
    """
    saved, chosen = None, None
    for name in reversed(complete(folder)) if is_first else ():
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
        return read(Path(local))


def complete(folder: Location) -> list[str]:
    """Return the names of the complete checkpoints in a folder, oldest first."""
    names = [info.path.rpartition("/")[2] for info in folder.children()]
    return sorted(name for name in names if (folder / name / _PROGRESS).exists)


def tidy(folder: Location, kept: int) -> None:
    """Delete all but the `kept` newest checkpoints, and Ray Train's list of them, before another submission.

    Ray refuses to start with a list that is truncated, that another release of Ray wrote, or that names a missing
    checkpoint. It deletes only what is on its list, so older checkpoints are deleted here.
    """
    (folder / _SNAPSHOT).delete()
    for name in complete(folder)[:-kept]:
        _delete(folder / name)


def go_back(folder: Location, chosen_by: str) -> int | None:
    """Delete the checkpoints from the best head's step on, so that training makes a damaged best head again.

    Return that step; None if no checkpoint has an evaluation. The best head has the highest β at `chosen_by` draft
    tokens.
    """
    for name in reversed(complete(folder)):
        try:
            records = json.loads((folder / name / _PROGRESS).read_text())["records"]
        except (ValueError, KeyError, TypeError):
            continue
        betas = [(record["beta"][chosen_by], record["step"]) for record in records if "beta" in record]
        if not betas:
            return None
        _, best = max(betas)
        for one in complete(folder):
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

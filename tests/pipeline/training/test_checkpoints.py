"""Checkpoints that are damaged are left out, by all workers alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.io.files import Location, locate
from pipeline.training.folder import (
    MOMENTS,
    SavedRun,
    checkpoint_name,
    complete_checkpoints,
    go_back,
    restore,
    tidy,
    upload,
    write_checkpoint,
)
from tests.support.damage import Damage, cut, empty


def saved(steps: int) -> SavedRun:
    """A run with a loss at each step, and an evaluation at every fourth; β is highest at step 8."""
    weights = {"w": torch.full((300,), float(steps))}
    records: list[dict[str, Any]] = [{"step": step, "loss": 1.0 / step, "time": 0.0} for step in range(1, steps + 1)]
    records += [{"step": step, "beta": {"16": 2.0 - abs(step - 8)}, "time": 0.0} for step in range(4, steps + 1, 4)]
    return SavedRun(steps, weights, {moment: {"w": weights["w"] + 1} for moment in MOMENTS}, records)


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    """Checkpoints of the steps 4, 8, 12 and 16."""
    kept = tmp_path / "kept"
    for step in (4, 8, 12, 16):
        local = tmp_path / "local"
        local.mkdir()
        write_checkpoint(saved(step), local)
        upload(local, locate(str(kept)) / checkpoint_name(step))
        shutil.rmtree(local)
    return locate(str(kept))


def restored(folder: Location) -> tuple[int | None, list[str]]:
    """The step that a run goes on from, and what the user is told. Two workers must agree."""
    told: list[str] = []
    agreed: list[str | None] = []

    def give(name: str | None) -> str | None:
        agreed.append(name)
        return name

    first = restore(folder, True, give, told.append)
    second = restore(folder, False, lambda name: agreed[0], told.append)
    assert (first is None) == (second is None)
    if first is None or second is None:
        return None, told
    assert first.steps == second.steps
    assert torch.equal(first.weights["w"], second.weights["w"])
    assert first.records == second.records == saved(first.steps).records
    return first.steps, told


@pytest.mark.parametrize("damage", [empty, cut])
@pytest.mark.parametrize("file", ["state.safetensors", "progress.json"])
def test_the_newest_that_can_be_read(folder: Location, file: str, damage: Damage) -> None:
    assert restored(folder) == (16, [])
    damage(Path(folder.path) / checkpoint_name(16) / file)
    steps, told = restored(folder)
    assert steps == 12
    assert [line.split(" is damaged")[0] for line in told] == ["checkpoint step-00000016"]
    for name in complete_checkpoints(folder):
        damage(Path(folder.path) / name / file)
    steps, told = restored(folder)
    assert steps is None
    assert len(told) == 4


def test_weights_that_are_gone(folder: Location) -> None:
    (Path(folder.path) / checkpoint_name(16) / "state.safetensors").unlink()
    assert restored(folder)[0] == 12


def test_without_checkpoints_a_run_is_new(tmp_path: Path) -> None:
    assert restored(locate(str(tmp_path / "none"))) == (None, [])


def test_only_the_newest_are_kept_and_rays_own_list_is_not(folder: Location) -> None:
    torn = Path(folder.path) / "checkpoint_manager_snapshot.json"
    torn.write_text('{"ray_ver')
    begun = Path(folder.path) / checkpoint_name(20)
    begun.mkdir()
    tidy(folder, 2)
    assert complete_checkpoints(folder) == [checkpoint_name(12), checkpoint_name(16)]
    assert not torn.exists()
    assert begun.exists()
    tidy(folder, 2)
    assert restored(folder)[0] == 16


@pytest.mark.parametrize("damaged", [None, 16])
def test_the_step_of_the_best_head_is_taken_again(folder: Location, damaged: int | None) -> None:
    if damaged:
        (Path(folder.path) / checkpoint_name(damaged) / "progress.json").write_text(json.dumps({"steps": 16}))
    assert go_back(folder, "16") == 8
    assert complete_checkpoints(folder) == [checkpoint_name(4)]
    assert go_back(folder, "16") == 4
    assert complete_checkpoints(folder) == []
    assert go_back(folder, "16") is None

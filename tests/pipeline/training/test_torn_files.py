"""Whichever file of a training run is torn, the next submission ends well, with the same head and losses."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pipeline.io.files import locate
from pipeline.output.lease import Lease
from tests.pipeline.training.conftest import Train, Training
from tests.support.damage import cut, empty, files_below, tear
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
CHECKPOINTS = [f"_checkpoints/step-000000{step}" for step in (20, 24)]
FINISHED = [
    "run.json tensorboard/* _checkpoints/checkpoint_manager_snapshot.json head/model.safetensors _staged/texts.json",
    "run.json.copy metrics.jsonl head/config.json"
    " _staged/held-out.parquet _staged/part-000000.parquet _staged/token-counts.parquet",
    f"{CHECKPOINTS[0]}/progress.json {CHECKPOINTS[1]}/state.safetensors",
    f"{CHECKPOINTS[1]}/progress.json {CHECKPOINTS[0]}/state.safetensors",
]
"""All files of a finished run. Those in one line are torn together: none of them is made from another."""
LAST = (f"{CHECKPOINTS[1]}/progress.json", f"{CHECKPOINTS[1]}/state.safetensors")
"""Files that are not there yet if the driver ended before its last checkpoint was uploaded."""
UNFINISHED = [" ".join(name for name in names.split() if name not in LAST) for names in FINISHED[:3]]


@pytest.fixture
def finished(unbroken: Training, tmp_path: Path) -> Training:
    """A copy of an undisturbed run."""
    return Training(0, "", "", Path(shutil.copytree(unbroken.folder, tmp_path / "trained")))


@pytest.fixture
def unfinished(finished: Training) -> Training:
    """As its driver left it when it ended at once."""
    folder = finished.folder
    run = json.loads((folder / "run.json").read_text())
    for name in ("run.json", "run.json.copy"):
        (folder / name).write_text(json.dumps({**run, "state": "running"}))
    shutil.rmtree(folder / CHECKPOINTS[1])
    return finished


def named(folder: Path) -> set[str]:
    """All files of a run, with a name for those that have the time in theirs."""
    files = {"tensorboard/*" if name.startswith("tensorboard/") else name for name in files_below(folder)}
    return {name for name in files if not name.startswith("_checkpoints/.")}


def assert_same(done: Training, unbroken: Training) -> None:
    """Everything that a run leaves to its user is there, and as an undisturbed run leaves it."""
    assert done.code == 0, done.stderr
    assert done.losses == pytest.approx(unbroken.losses, rel=2e-4)
    assert list(done.betas) == list(unbroken.betas)
    for step, beta in done.betas.items():
        assert beta == pytest.approx(unbroken.betas[step], rel=0.02)
    heads = [load_file(one.folder / "head" / "model.safetensors") for one in (done, unbroken)]
    assert heads[0].keys() == heads[1].keys()
    for name, weight in heads[0].items():
        assert weight == pytest.approx(heads[1][name], abs=1e-4)
    assert json.loads((done.folder / "head" / "config.json").read_text())["training"]["history"][-1]["step"] == 24
    assert json.loads((done.folder / "run.json").read_text())["state"] == "finished"
    (events,) = (done.folder / "tensorboard").iterdir()
    assert events.stat().st_size > 1000
    assert "_lease.json" not in files_below(done.folder)


def test_these_are_all_files(unbroken: Training, unfinished: Training) -> None:
    assert named(unbroken.folder) == set(" ".join(FINISHED).split())
    assert named(unfinished.folder) == set(" ".join(FINISHED).split()) - set(LAST)


@pytest.mark.parametrize("files", FINISHED)
def test_torn_files_of_a_finished_run(train: Train, finished: Training, unbroken: Training, files: str) -> None:
    tear(finished.folder, files, empty)
    assert_same(train(output=finished.folder), unbroken)


@pytest.mark.parametrize("files", UNFINISHED)
def test_torn_files_of_an_unfinished_run(train: Train, unfinished: Training, unbroken: Training, files: str) -> None:
    tear(unfinished.folder, files, cut)
    assert_same(train(output=unfinished.folder), unbroken)


def test_a_torn_checkpoint_is_told_and_the_one_before_is_used(
    train: Train, finished: Training, unbroken: Training
) -> None:
    """The head is torn, too, and its step is after the checkpoint that is left: it is taken again."""
    folder = finished.folder
    cut(folder / CHECKPOINTS[1] / "state.safetensors")
    empty(folder / "head" / "model.safetensors")
    done = train(output=folder)
    assert "what is not whole is made again: head/model.safetensors" in done.stderr
    assert "head is damaged: step 24, which it is of, is taken again" in done.stderr
    assert_same(done, unbroken)
    steps = [int(line.split()[1].split("/")[0]) for line in done.stderr.splitlines() if line.startswith("step ")]
    assert steps[0] == 21


def test_one_submission_trains_at_a_time(train: Train, unfinished: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = 1.0
    monkeypatch.setattr("pipeline.training.job.Lease", lambda file, lost: Lease(file, lost, beat))
    with Lease(locate(str(unfinished.folder / "_lease.json")), lambda by: None, beat):
        refused = train(output=unfinished.folder)
    assert refused.code == 2
    assert "another submission works on output" in refused.error


def test_a_submission_that_has_lost_its_lease_stops(
    train: Train, unbroken: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = 0.5
    monkeypatch.setattr("pipeline.training.job.Lease", lambda file, lost: Lease(file, lost, beat))
    folder = tmp_path / "trained"
    other = {"name": "y", "host": "another", "pid": 1, "beat": 1}

    def take_over() -> None:
        wait_until(lambda: list(folder.glob("_checkpoints/step-*/progress.json")), "a checkpoint")
        locate(str(folder / "_lease.json")).write_text(json.dumps(other))

    taker = threading.Thread(target=take_over)
    taker.start()
    # In this process its workers go on to the end, and the next test waits for them: a few hundred steps are enough.
    stopped = train(output=folder, training__steps=250)
    taker.join()
    assert stopped.code == 143, stopped.stderr
    assert "process 1 on another works on the output now" in stopped.error
    assert json.loads((folder / "_lease.json").read_text()) == other

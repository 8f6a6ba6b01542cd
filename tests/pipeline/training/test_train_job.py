"""The training job from end to end, on real Ray with real DeepSpeed workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from pyarrow import fs
from safetensors.torch import load_file

from drafter.heads.checkpoint import load_head
from drafter.target_model.loading import load_base
from pipeline.command_line import say
from pipeline.io.files import locate
from tests.pipeline.conftest import Driver, Run, write_jsonl
from tests.pipeline.training.conftest import Train, Training, arguments_of
from tests.support.faults import FullFiles
from tests.support.prepared_workers import PreparedWorkers
from tests.support.waiting import PATIENCE, wait_until


def test_the_best_head_is_kept_and_everything_is_told(
    unbroken: Training, model: Path, train: Train, run: Run, tmp_path: Path
) -> None:
    assert list(unbroken.losses) == list(range(1, 25))
    assert list(unbroken.betas) == [12, 24]
    assert unbroken.checkpoints == ["step-00000020", "step-00000024"]

    # The head that was kept is the one with the best β, and it says where it comes from.
    head = load_head(unbroken.folder / "head", load_base(model, device="cpu"))
    assert head.provenance is not None
    history = head.provenance.training["history"]
    assert history[-1]["beta"]["16"] == max(beta["16"] for beta in unbroken.betas.values())
    assert {entry["step"]: entry["beta"] for entry in history}.items() <= unbroken.betas.items()
    assert head.vocabulary is not None
    staged = pyarrow.parquet.read_table(sorted((unbroken.folder / "_staged").glob("part-*[0-9].parquet")))
    answers = [token for row in staged.to_pylist() for token in row["tokens"][row["prompt_length"] :]]
    frequent = sorted(sorted(range(320), key=lambda token: -answers.count(token))[:64])
    assert head.vocabulary.tokens.tolist() == frequent
    covered = sum(token in frequent for token in answers) / len(answers)
    known = head.provenance.training["draft_vocabulary"]
    assert known == {"tokens": 64, "coverage": pytest.approx(covered, abs=1e-4)}
    counts = head.provenance.training["data"]
    assert (counts["texts"] + counts["held_out"], counts["held_out"], counts["unusable"]) == (40, 6, 0)
    ran = json.loads((unbroken.folder / "run.json").read_text())
    assert (ran["state"], ran["texts"]) == ("finished", counts)

    (events,) = (unbroken.folder / "tensorboard").iterdir()
    assert events.stat().st_size > 1000

    # Submitted again it does nothing; with another meaning it is refused.
    before = {path: path.stat().st_mtime_ns for path in unbroken.folder.rglob("*") if path.is_file()}
    again = train(output=unbroken.folder, workers__number=2)
    assert again.code == 0
    assert "the best of 2 by 16 nodes" in again.stdout
    refused = train(output=unbroken.folder, training__learning_rate=1e-4)
    assert refused.code == 2
    assert "training.learning_rate was 0.001, is now 0.0001" in refused.error
    assert {path: path.stat().st_mtime_ns for path in unbroken.folder.rglob("*") if path.is_file()} == before

    # And it drafts.
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "how many pens"}])
    drafted = run(source, "--engine.num_draft_tokens", 4, drafter=str(unbroken.folder / "head"))
    assert drafted.code == 0, drafted.stderr
    assert drafted.rows[0]["num_draft_tokens"] > 0


@pytest.mark.slow
def test_a_signal_saves_the_step_and_the_next_submission_goes_on_from_it(
    train: Train, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Before the first checkpoint is due. In this process Ctrl-C is SIGINT to ourselves."""

    def signalled(number: signal.Signals, workers: int) -> Training:
        left = [number]

        def hear(line: str) -> None:
            say(line)
            if line.startswith("step ") and "loss" in line and left:
                os.kill(os.getpid(), left.pop())

        monkeypatch.setattr("pipeline.training.job.say", hear)
        monkeypatch.setattr("pipeline.training.job._SAVE_SECONDS", PATIENCE)
        many = {"training__steps": 9000, "training__evaluate_every": 9000, "checkpoint_every": 9000}
        return train(**many, workers__number=workers)

    # A process that a shell has started in the background ignores SIGINT.
    before_us = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before_us))
    stopped = signalled(signal.SIGTERM, workers=2)
    assert stopped.code == 143
    assert "stopping: the step that is under way is saved first" in stopped.stderr
    (first,) = stopped.checkpoints
    assert f"step {int(first[5:])} is saved" in stopped.stderr
    interrupted = signalled(signal.SIGINT, workers=1)
    assert interrupted.code == 130
    assert f"going on after step {int(first[5:])} of 9000" in interrupted.stderr
    before, second = interrupted.checkpoints
    assert (before, second > first) == (first, True)
    # Every step once, in the metrics too.
    assert list(interrupted.losses) == list(range(1, int(second[5:]) + 1))


def same(one: Training, other: Training) -> None:
    """Whether two runs have the same losses and β, up to rounding."""
    assert one.losses == pytest.approx(other.losses, rel=2e-4)
    assert list(one.betas) == list(other.betas)
    for step, beta in one.betas.items():
        assert beta == pytest.approx(other.betas[step], rel=0.02)


@pytest.mark.slow
def test_a_head_of_several_hidden_layers_learns_the_same_anywhere_and_is_exported(
    train: Train, model: Path, tmp_path: Path
) -> None:
    """With the base's states computed or stored, and weights partitioned; the teacher reads a layer more."""
    shape = {"depth": 3, "num_heads": 2, "intermediate_size": 48, "draft_vocab_size": 64, "hidden_layers": [0, 1, 1]}
    settings = {"algorithm": "eagle3", "head": json.dumps(shape), "training__teacher": 2, "training__steps": 12}
    one = train(**settings, export="speculators")
    assert one.code == 0, one.stderr
    two = train(
        output=tmp_path / "two", workers__number=2, sharding__zero_stage=3, texts__store_hidden=True, **settings
    )
    assert two.code == 0, two.stderr
    same(two, one)
    base = load_base(model, device="cpu")
    tokens = json.loads((two.folder / "run.json").read_text())["texts"]["tokens"]
    assert f"hidden states of {tokens:,} tokens: {tokens:,} × {4 * 32} × 4 bytes" in two.stderr
    stored = pyarrow.parquet.read_table(two.folder / "_staged" / "part-000000.hidden.parquet")["hidden"]
    assert sum(len(row.as_py()) for row in stored) == tokens * 4 * 32 * 4

    trained, exported = (load_head(one.folder / name, base) for name in ("head", "export"))
    assert all(torch.equal(exported.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())
    embeddings = load_file(one.folder / "export" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(embeddings, base.embed(torch.arange(base.vocab_size)))
    # Submitted again, a finished job exports what it has; what has no layout is refused at once.
    (one.folder / "export" / "config.json").unlink()
    assert train(output=one.folder, **settings, export="speculators").code == 0
    assert (one.folder / "export" / "config.json").is_file()
    refused = train(output=tmp_path / "no", algorithm="ctc", export="speculators")
    assert refused.code == 2
    assert "heads of algorithm 'ctc' have no layout that others read; eagle3, medusa have" in refused.error


@pytest.mark.slow
def test_a_trained_head_goes_on_from_where_it_was(
    train: Train, unbroken: Training, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # workers run elsewhere
    start = Path("start")
    shutil.copytree(unbroken.folder / "head", start)
    settings = {"start": start, "head": "{}", "training__steps": 4, "training__evaluate_every": 4}
    more = train(**settings)
    assert more.code == 0, more.stderr
    assert more.losses[1] < unbroken.losses[1]
    before, after = (load_head(folder, load_base(model, device="cpu")) for folder in (start, more.folder / "head"))
    assert before.provenance is not None
    assert after.provenance is not None
    assert after.config == before.config
    assert after.provenance.training["start"] == before.provenance.training
    assert after.provenance.training["draft_vocabulary"]["tokens"] == 64
    # The head that it began with is one of those to choose from.
    assert list(more.betas) == [0, 4]
    assert more.betas[0] == pytest.approx(before.provenance.training["history"][-1]["beta"])
    chosen = max(more.betas, key=lambda step: (more.betas[step]["16"], step))
    assert after.provenance.training["history"][-1]["step"] == chosen
    assert before.vocabulary is not None
    assert after.vocabulary is not None
    assert torch.equal(after.vocabulary.tokens, before.vocabulary.tokens)
    assert train(output=more.folder, **settings).code == 0  # it is finished
    other = train(output=tmp_path / "other", algorithm="eagle3", **settings)
    assert other.code == 2
    assert "start is a head of ctc, and algorithm is eagle3: leave algorithm out" in other.error
    # Another head to start from is another job.
    shutil.copy(more.folder / "head" / "model.safetensors", start)
    refused = train(output=more.folder, **settings)
    assert refused.code == 2
    assert "start was" in refused.error


def wait_for_step(job: subprocess.Popen[str], output: Path, step: int) -> None:
    """Wait until there is a checkpoint of `step` or later."""

    def is_there() -> bool:
        assert job.poll() is None, "the job ended"
        return any(int(path.parent.name[5:]) >= step for path in output.glob("_checkpoints/step-*/progress.json"))

    wait_until(is_there, f"a checkpoint of step {step}", pause=0.02)


@pytest.mark.slow
def test_killed_workers_and_drivers_do_not_show_in_the_losses(
    local_ray: PreparedWorkers,
    driver: Driver,
    unbroken: Training,
    train: Train,
    model: Path,
    distilled: Path,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    arguments = arguments_of(distilled, broken, model, workers__number=2)
    with driver("jobs.train", *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        wait_for_step(job, broken, 4)
        local_ray.named("RayTrainWorker")[-1].kill()
        wait_for_step(job, broken, 12)

    # The same command with another number of workers.
    resumed = train(output=broken)
    assert resumed.code == 0, resumed.stderr
    steps = [int(line.split()[1].split("/")[0]) for line in resumed.stderr.splitlines() if line.startswith("step ")]
    assert steps[0] > 12
    same(resumed, unbroken)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_the_last_good_checkpoint_stays(train: Train) -> None:
    broken = train(
        training__learning_rate=1e30,
        training__clip=1e30,
        training__evaluate_every=1,
        checkpoint_every=1,
        workers__max_failures=0,
    )
    assert broken.code == 2
    assert "the loss is" in broken.error
    assert "lower the learning rate" in broken.error
    assert broken.checkpoints
    assert all(loss == loss for loss in broken.losses.values())


@pytest.mark.slow
def test_a_full_disk_stops_and_the_job_goes_on_when_there_is_room(
    unbroken: Training, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.job.connect", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        interrupted = train()
    assert interrupted.code == 130
    # Writing the checkpoint of step 8 ends as on a full disk.
    full = fs.PyFileSystem(FullFiles(str(interrupted.folder / "_checkpoints" / "step-00000008")))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.job.locate", lambda uri: replace(locate(uri), filesystem=full))
        stopped = train()
    assert stopped.code == 1
    assert "the disk is full" in stopped.error
    assert "step-00000004" in stopped.checkpoints
    resumed = train()
    assert resumed.code == 0, resumed.stderr
    assert resumed.losses == unbroken.losses


@pytest.mark.slow
def test_an_imitation_network_trains_like_any_other_head(train: Train, model: Path) -> None:
    settings = json.dumps({"layers": 1, "depth": 3, "inner_size": 32, "draft_vocab_size": 60})
    trained = train(algorithm="imitation", head=settings, training__steps=6, training__evaluate_every=3)
    assert trained.code == 0
    base = load_base(model, device="cpu")
    assert load_head(trained.folder / "head", base).drafter(base, 8).spec.max_depth == 3
    assert all(1.0 <= beta["16"] <= 4.0 for beta in trained.betas.values())

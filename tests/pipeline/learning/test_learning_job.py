"""Jobs whose head learns: the tokens are those of plain decoding, whatever dies, and what was learnt is kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from drafter.heads.checkpoint import load_head
from drafter.methods.learning.drafter import version_of
from drafter.target_model.loading import load_base
from jobs.report import main as report
from tests.pipeline.conftest import Outcome, Run, write_jsonl
from tests.support.faults import NotedLearner, UnhurriedEngine
from tests.support.paths import ROOT
from tests.support.quick_learner import quick_settings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = [f"how many {'apples and pens ' * (n % 3)}does she have {n}" for n in range(600)]
LEARNING = ("--learning", "true", "--learning.head", "new", "--learning.share", 1, "--engine.num_draft_tokens", "auto")


def tokens_by_row(done: Outcome) -> dict[str, list[int]]:
    assert done.code == 0, done.stderr
    return {row["request_id"]: row["token_ids"] for row in done.rows}


def saved(folder: Path) -> int:
    """The newest version in an output; 0 before the first."""
    file = folder / "head" / "config.json"
    return int(json.loads(file.read_text())["training"]["learnt"]["version"]) if file.exists() else 0


def newest(notes: Path, kind: str) -> int:
    """The process id of the engine or learner that began last."""
    return int(max(notes.glob(f"*.{kind}"), key=lambda path: path.stat().st_mtime_ns).stem)


def kill_both(notes: Path, over: threading.Event) -> None:
    """End the learner's process and then the engine's, each after a version, and let the job go on fast.

    Args:
        notes: Where processes note their ids.
        over: Whether the job has come to its end: then there is nothing to wait for.
    """
    out = notes / "out"

    def has_version(number: int) -> bool:
        assert not over.is_set(), "the job ended first"
        return saved(out) >= number

    def has_begun(kind: str) -> bool:
        assert not over.is_set(), "the job ended first"
        return len(list(notes.glob(f"*.{kind}"))) > 1

    try:
        wait_until(partial(has_version, 1), "a version")
        os.kill(newest(notes, "learner"), signal.SIGKILL)
        wait_until(partial(has_begun, "learner"), "another learner")
        last = saved(out)
        wait_until(partial(has_version, last + 1), "a version of the other learner")
        os.kill(newest(notes, "engine"), signal.SIGKILL)
        wait_until(partial(has_begun, "engine"), "another engine")
        wait_until(partial(has_version, last + 2), "a version of the other engine's rows")
    finally:
        (notes / "go").touch()  # whatever has failed, the job comes to its end


def test_tokens_are_those_of_plain_decoding_when_learner_and_engine_are_killed(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    settings = ("--sampling.temperature", 0.8, "--writing.rows_per_file", 50)
    plain = run(source, *settings, drafter="none", output=tmp_path / "plain")
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", partial(UnhurriedEngine, notes=tmp_path))
    monkeypatch.setattr("pipeline.learning.learner_actor.LearnerActor", NotedLearner)
    monkeypatch.setattr("drafter.methods.learning.settings.LearnerSettings", quick_settings)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_both, tmp_path, over)
        try:
            done = run(source, *settings, *LEARNING, drafter="auto")
        finally:
            over.set()
    assert done.code == 0, done.stderr
    killed.result()  # raises what it has raised
    assert tokens_by_row(done) == tokens_by_row(plain)
    assert len(done.rows) == len(PROMPTS)

    last = saved(done.folder)
    drafted = {row["drafter_version"] for row in done.rows}
    assert drafted - {None}
    assert drafted <= {None, *range(last + 1)}
    status, ran = (json.loads((done.folder / name).read_text()) for name in ("status.json", "run.json"))
    assert status["learning"]["version"] == ran["learning"]["version"] == last
    assert f"version {last} of the head" in done.stderr

    assert report([str(done.folder), "--examples", "0"]) == 0
    assert f"The newest version of the head is {last:,}." in (done.folder / "report.html").read_text()

    base = load_base(model)
    head = load_head(done.folder / "head", base)
    assert version_of(head) == last

    # A part is lost: another submission makes it again, and begins with the head that was learnt.
    lost = sorted((done.folder / "data").iterdir())[0]
    lost.unlink()
    again = run(source, *settings, *LEARNING, drafter="auto")
    assert tokens_by_row(again) == tokens_by_row(plain)
    made_again = again.parts[lost.name]
    assert min(row["drafter_version"] for row in made_again if row["drafter_version"] is not None) >= last


def test_jobs_work_without_the_method(tmp_path: Path) -> None:
    for package in ("drafter", "pipeline", "jobs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "drafter" / "methods" / "learning")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "Tom has 3 boxes"}])
    command = [sys.executable, "-m", "jobs.generate", "--input", str(source), "--sampling.max_new_tokens", "8"]
    own = {"PYTHONPATH": str(tmp_path), "RAY_ADDRESS": "local"}

    def submit(*settings: str) -> subprocess.CompletedProcess[str]:
        given = [*command, *settings]
        return subprocess.run(given, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=600)

    done = submit("--output", "out")
    assert done.returncode == 0, done.stderr
    assert "rows        1 finished, 0 failed" in done.stdout
    asked = submit("--output", "other", "--learning")
    assert asked.returncode == 2
    assert "this installation is without the method learning" in asked.stderr

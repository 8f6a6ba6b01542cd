"""Jobs whose head learns: the tokens are those of plain decoding, whatever dies, and what was learnt is kept."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafter.heads.checkpoint import load_head
from drafter.methods.learning.drafter import version_of
from drafter.target.loading import load_base
from jobs.report import main as report
from tests.pipeline.conftest import Outcome, Run, write_jsonl
from tests.support.faults import NotedLearner, UnhurriedEngine
from tests.support.waiting import wait_until

PROMPTS = [f"how many {'apples and pens ' * (n % 3)}does she have {n}" for n in range(600)]
LEARNING: tuple[Any, ...] = (
    *(
        "--learning",
        "true",
        "--learning.head",
        "new",
        "--learning.must_pay",
        "false",
        "--engine.num_draft_tokens",
        "auto",
    ),
    *("--learning.training.texts_per_step", 2, "--learning.training.anchors_per_text", 4),
    *("--learning.training.held_out_share", 0.3, "--learning.training.held_out_rows", 4),
    *("--learning.training.least_held_out", 1, "--learning.training.evaluate_every", 2),
    *("--learning.training.least_gain", 1.0, "--learning.training.teacher", 0),
)
"""A head from nothing, of which there is a new version every few seconds."""


def tokens_by_row(done: Outcome) -> dict[str, list[int]]:
    assert done.code == 0, done.stderr
    return {row["request_id"]: row["token_ids"] for row in done.rows}


def record_of(folder: Path) -> dict[str, Any]:
    file = folder / "learning.json"
    return json.loads(file.read_text()) if file.exists() else {"versions": []}


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
        versions = record_of(out)["versions"]
        return bool(versions) and versions[-1]["number"] >= number

    def has_begun(kind: str) -> bool:
        assert not over.is_set(), "the job ended first"
        return len(list(notes.glob(f"*.{kind}"))) > 1

    try:
        wait_until(partial(has_version, 1), "a version")
        os.kill(newest(notes, "learner"), signal.SIGKILL)
        wait_until(partial(has_begun, "learner"), "another learner")
        last = record_of(out)["versions"][-1]["number"]
        wait_until(partial(has_version, last + 1), "a version of the other learner")
        os.kill(newest(notes, "engine"), signal.SIGKILL)
        wait_until(partial(has_begun, "engine"), "another engine")
        wait_until(partial(has_version, last + 2), "a version of the other engine's rows")
    finally:
        (notes / "go").touch()  # whatever has failed, the job comes to its end


def test_a_job_too_short_to_gain_has_no_learner_beside_it(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:40]])
    plain = run(source, drafter="none", output=tmp_path / "plain")
    monkeypatch.setattr("pipeline.learning.learner_actor.LearnerActor", NotedLearner)
    done = run(
        source, "--learning", "true", "--learning.head", "new", "--engine.num_draft_tokens", "auto", drafter="auto"
    )
    assert tokens_by_row(done) == tokens_by_row(plain)
    assert "learner: not begun: " in done.stderr
    assert not list(tmp_path.glob("*.learner"))
    told = json.loads((done.folder / "status.json").read_text())["learning"]
    assert told["version"] is None
    assert told["state"] in ("starting", "resting")


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding_when_learner_and_engine_are_killed(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    settings = ("--sampling.temperature", 0.8, "--writing.rows_per_file", 50)
    plain = run(source, *settings, drafter="none", output=tmp_path / "plain")
    monkeypatch.setattr("pipeline.generate.job.EngineSpec", partial(UnhurriedEngine, notes=tmp_path))
    monkeypatch.setattr("pipeline.learning.learner_actor.LearnerActor", NotedLearner)
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

    versions = [one["number"] for one in record_of(done.folder)["versions"]]
    assert versions == sorted(set(versions))  # no number is given to two heads
    drafted = {row["drafter_version"] for row in done.rows}
    assert drafted - {None}
    assert drafted <= {None, 0, *versions}
    status, ran = (json.loads((done.folder / name).read_text()) for name in ("status.json", "run.json"))
    assert status["learning"]["version"] == ran["learning"]["version"] == versions[-1]
    assert f"version {versions[-1]} of the head" in done.stderr

    assert report([str(done.folder), "--examples", "0"]) == 0
    assert f"The newest version of the head is {versions[-1]:,}." in (done.folder / "report.html").read_text()

    base = load_base(model)
    head = load_head(done.folder / "head", base)
    assert version_of(head) == versions[-1]

    # A part is lost: another submission makes it again, and begins with the head that was learnt.
    lost = sorted((done.folder / "data").iterdir())[0]
    lost.unlink()
    again = run(source, *settings, *LEARNING, drafter="auto")
    assert tokens_by_row(again) == tokens_by_row(plain)
    made_again = again.parts[lost.name]
    assert min(row["drafter_version"] for row in made_again if row["drafter_version"] is not None) >= versions[-1]

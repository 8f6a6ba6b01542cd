"""What a learner begins with, and what of a cluster is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from drafter.embedded import EMBEDDED_HEADS
from drafter.methods.learning.learner import HeadVersion
from pipeline.cluster.ray_cluster import Cluster, Node
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig, parse_config
from pipeline.io.files import locate
from pipeline.learning.config import LearnerSpec, LearningConfig, beginning
from pipeline.learning.job_learner import JobLearner, beside_learner, seconds_left, tokens_left
from pipeline.learning.record import LearningRecord
from pipeline.output.folder import OutputFolder, put_head
from pipeline.progress.board import LearningReport, Progress
from tests.support.paths import ROOT

BOTH = ("--input", "a", "--output", "b")


def test_learning_is_asked_for_in_a_word_or_with_its_settings(tmp_path: Path) -> None:
    assert not parse_config(BOTH).learning.enabled
    given = parse_config(
        [*BOTH, "--learning", "true", "--learning.cpus", "2", "--learning.training.uses", "3"]
    ).learning
    assert (given.enabled, given.cpus, given.training.uses, given.head) == (True, 2, 3, "shipped")
    file = tmp_path / "job.yaml"
    file.write_text("input: a\noutput: b\nlearning: {enabled: true, cpus: 2, training: {uses: 3}}\n")
    config = parse_config(["--config", str(file)])
    assert config.learning == given
    file.write_text(yaml.safe_dump(config.as_dict()))
    assert parse_config(["--config", str(file)]) == config


def test_the_example_is_valid() -> None:
    config = parse_config(["--config", str(ROOT / "examples" / "learning.yaml")])
    assert (ROOT / config.input).is_file()
    assert config.learning.enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--learning maybe", "learning.enabled must be true or false, not maybe"),
        ("--learning true --learning.gpus 2", "learning.gpus must be at most 1, not 2"),
        ("--learning true --learning.cpus=-1", "learning.cpus must be at least 0, not -1"),
        ("--learning true --learning.training.uses 0", "learning.training.uses must be at least 1, not 0"),
        ("--learning true --drafter ngram", "drafter ngram has no head that could learn"),
        ("--learning true --verifier typical", "the verifier typical lets other tokens pass"),
        ("--learning true --engine.num_draft_tokens 0", "engine.num_draft_tokens 0 drafts nothing"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_config([*BOTH, *settings.split()])


def test_a_head_may_draft_alone_if_it_is_the_one_that_learns() -> None:
    learning = LearningConfig(enabled=True, head="some/head")
    assert GenerateConfig("a", "b", drafter="some/head", learning=learning).drafter == "some/head"


def test_a_submission_begins_with_the_head_in_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    new = LearningConfig(enabled=True, head="new", algorithm="medusa")
    here = tmp_path / "here"
    here.mkdir()
    assert beginning(new, output).here(str(here)).folder is None
    assert beginning(new, output).start.algorithm == "medusa"

    put_head(EMBEDDED_HEADS / "ctc", output.head)
    found = beginning(new, output).here(str(here))
    assert (found.folder, found.copied_from) == (str(here), str(tmp_path / "head"))
    for name in ("config.json", "model.safetensors"):
        assert (here / name).read_bytes() == (EMBEDDED_HEADS / "ctc" / name).read_bytes()

    saved = beginning(new, output)
    (tmp_path / "head" / "model.safetensors").unlink()
    assert saved.here(str(here)) == saved.start  # what cannot be read costs drafts, and not the job
    (tmp_path / "head" / "model.safetensors").write_bytes(b"torn")
    assert beginning(new, output).saved is None
    assert "is damaged, and learnt anew" in capsys.readouterr().err
    output.forget_job()
    assert not list((tmp_path / "head").iterdir())


def test_a_learner_takes_its_share_of_one_machine() -> None:
    cluster = Cluster((Node(2.0, 0.0), Node(8.0, 1.0)), may_grow=False)
    assert beside_learner(LearningConfig(enabled=True), cluster) == cluster
    assert beside_learner(LearningConfig(cpus=4), cluster) == cluster  # not enabled
    shared = beside_learner(LearningConfig(enabled=True, cpus=1, gpus=0.25), cluster)
    assert shared.nodes == (Node(2.0, 0.0), Node(7.0, 0.75))
    with pytest.raises(InputError, match="for the learner: lower"):
        beside_learner(LearningConfig(enabled=True, cpus=9), cluster)


def test_tokens_left_are_told_from_rows_that_have_ended() -> None:
    assert tokens_left(Progress(total=10)) is None
    assert tokens_left(Progress(total=10, rows=1, errors=1)) is None
    assert tokens_left(Progress(total=10, before=2, rows=3, errors=1, tokens=40)) == 100


def test_seconds_left_are_told_from_rows_after_the_first_ones() -> None:
    first = Progress(total=104, before=4, slots=16, rows=20, seconds=8.0)
    assert seconds_left(first, first) is None
    assert seconds_left(first, replace(first, rows=40, seconds=12.0)) is None  # so short a time says little
    assert seconds_left(first, replace(first, rows=30, seconds=20.0)) is None  # and so few rows
    assert seconds_left(first, replace(first, rows=4, seconds=20.0)) is None  # some were lost with an engine
    assert seconds_left(first, replace(first, rows=40, seconds=18.0)) == 30.0
    assert seconds_left(first, replace(first, rows=100, seconds=28.0)) == 0.0


class StartedLearner:
    """A learner's process that has begun."""

    failures = 0
    """So many times it cannot be started."""

    def __init__(self, spec: LearnerSpec, name: str) -> None:
        if StartedLearner.failures:
            StartedLearner.failures -= 1
            raise RuntimeError("no head node")

    def ask(self, tokens_left: float | None) -> LearningReport:
        left = "some" if tokens_left is None else f"{tokens_left:.0f}"
        return LearningReport("learning", f"{left} tokens are left")

    def close(self) -> LearningReport:
        return LearningReport("learning", "it has been ended")


def job_learner(monkeypatch: pytest.MonkeyPatch, output: Path, **settings: Any) -> JobLearner:
    """A job's learner, of which only the process is not there."""
    monkeypatch.setattr("pipeline.learning.job_learner.WatchedLearner", StartedLearner)
    config, folder = LearningConfig(enabled=True, head="new", **settings), OutputFolder(locate(str(output)))
    return JobLearner(LearnerSpec(config, beginning(config, folder), folder, "run", "model", "auto", False))


def told(learner: JobLearner, now: Progress) -> LearningReport:
    return cast(LearningReport, learner.look(now).learning)


SHORT = Progress(total=100, slots=16, rows=20, tokens=2000, seconds=4.0)
LONG = Progress(total=10_000, slots=16, rows=16, tokens=1600, seconds=4.0)


def later(now: Progress) -> Progress:
    """Ten seconds and twenty rows later."""
    return replace(now, rows=now.rows + 20, tokens=now.tokens + 2000, seconds=now.seconds + 10.0)


def test_a_learner_of_a_short_job_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = job_learner(monkeypatch, tmp_path)
    assert told(learner, replace(SHORT, rows=0)) == LearningReport(reason="nothing has been decoded yet")
    for early in (replace(SHORT, rows=4), SHORT):
        found = told(learner, early)
        assert (found.state, found.reason) == ("resting", "too few rows are done to tell how long the job takes")
    found = told(learner, later(SHORT))
    assert found.state == "resting"
    assert found.reason == "30 s are left, and its process would take about 2 s to begin"
    assert told(learner, replace(SHORT, rows=100, seconds=44.0)) == found  # nothing is left to decide about
    assert learner.close() == found
    assert f"learner: not begun: {found.reason}" in capsys.readouterr().err


def test_a_learner_is_started_once_so_much_is_left_that_it_may_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = job_learner(monkeypatch, tmp_path)
    for early in (replace(LONG, rows=15), LONG):
        assert told(learner, early).state == "resting"
    assert told(learner, later(LONG)) == LearningReport("learning", "996400 tokens are left")
    assert learner.close().reason == "it has been ended"


def test_the_pace_is_measured_anew_when_rows_are_lost_with_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = job_learner(monkeypatch, tmp_path)
    told(learner, replace(SHORT, total=2000, rows=500, seconds=10.0))
    lost = replace(SHORT, total=2000, rows=300, seconds=40.0)
    assert told(learner, lost).reason == "too few rows are done to tell how long the job takes"
    # Since the first look at all, there were 100 rows in 40 seconds: at that pace 560 seconds would be left.
    found = told(learner, replace(lost, rows=600, seconds=50.0))
    assert found.reason == "47 s are left, and its process would take about 2 s to begin"


@pytest.mark.parametrize("settings", [{"cpus": 1.0}, {"gpus": 0.5}, {"must_pay": False}])
def test_a_learner_that_costs_engines_nothing_or_must_learn_is_started_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    learner = job_learner(monkeypatch, tmp_path, **settings)
    assert learner.close().reason == "it has been ended"


def test_a_learner_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartedLearner, "failures", 2)
    learner = job_learner(monkeypatch, tmp_path, must_pay=False)
    assert told(learner, Progress()).reason == "it cannot be started for now: no head node"
    assert told(learner, Progress()).state == "learning"


def test_what_earlier_submissions_have_learnt_is_told_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = LearningRecord()
    record.published(HeadVersion(3, {}, beta=1.5, beta_before=1.0), at=3.0)
    (tmp_path / "learning.json").write_text(record.as_json())
    found = told(job_learner(monkeypatch, tmp_path), SHORT)
    assert (found.state, found.version, found.published_beta) == ("resting", 3, 1.5)


def test_a_gpu_that_is_not_its_own_belongs_to_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(**settings: Any) -> str:
        config, folder = LearningConfig(enabled=True, **settings), OutputFolder(locate(str(tmp_path)))
        return LearnerSpec(config, beginning(config, folder), folder, "run", "m", "auto", False).device

    assert (device(), device(cpus=2.0), device(gpus=0.25)) == ("cpu", "cpu", "auto")

"""What a learner begins with, and what of a cluster is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from drafter.embedded import EMBEDDED_HEADS
from pipeline.cluster.ray_cluster import Cluster, Node
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig, parse_config
from pipeline.io.files import locate
from pipeline.learning.config import LearnerSpec, LearningConfig, beginning, learner_spec
from pipeline.learning.job_learner import JobLearner, beside_learner
from pipeline.output.folder import OutputFolder, put_head
from pipeline.progress.board import LearningReport, Progress
from pipeline.settings import LoadingConfig
from tests.support.paths import ROOT

BOTH = ("--input", "a", "--output", "b")


def test_learning_is_asked_for_in_a_word_or_with_its_settings(tmp_path: Path) -> None:
    assert not parse_config(BOTH).learning.enabled
    given = parse_config([*BOTH, "--learning", "true", "--learning.share", "0.5"]).learning
    assert (given.enabled, given.share, given.head) == (True, 0.5, "shipped")
    file = tmp_path / "job.yaml"
    file.write_text("input: a\noutput: b\nlearning: {enabled: true, share: 0.5}\n")
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
        ("--learning true --learning.share 0", "learning.share must be more than 0, not 0"),
        ("--learning true --learning.share 1.5", r"learning.share must be at most 1, not 1\.5"),
        ("--learning true --learning.head new:tree", "learning.head new:tree is not known: new heads .* ctc, .*medusa"),
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
    new = LearningConfig(enabled=True, head="new:medusa")
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
    assert beside_learner(LearningConfig(gpus=0.5), cluster) == cluster  # not enabled
    shared = beside_learner(LearningConfig(enabled=True, gpus=0.25), cluster)
    assert shared.nodes == (Node(2.0, 0.0), Node(8.0, 0.75))
    with pytest.raises(InputError, match=r"no machine has 0\.5 GPUs for the learner"):
        beside_learner(LearningConfig(enabled=True, gpus=0.5), Cluster((Node(2.0, 0.25),), may_grow=False))


class StartedLearner:
    """A learner's process that has begun."""

    failures = 0
    """So many times it cannot be started."""

    def __init__(self, spec: LearnerSpec, name: str) -> None:
        if StartedLearner.failures:
            StartedLearner.failures -= 1
            raise RuntimeError("no head node")

    def ask(self) -> LearningReport:
        return LearningReport("learning")

    def close(self) -> LearningReport:
        return LearningReport("learning", "it has been ended")


def spec_of(output: Path, **settings: Any) -> LearnerSpec:
    config = LearningConfig(enabled=True, head="new", **settings)
    return learner_spec(config, OutputFolder(locate(str(output))), "run", "model", LoadingConfig())


def told(learner: JobLearner, now: Progress) -> LearningReport:
    return cast(LearningReport, learner.look(now).learning)


def test_a_learner_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learning.job_learner.WatchedLearner", StartedLearner)
    monkeypatch.setattr(StartedLearner, "failures", 2)
    learner = JobLearner(spec_of(tmp_path))
    assert told(learner, Progress()).reason == "it cannot be started for now: no head node"
    assert told(learner, Progress()).state == "learning"
    assert learner.close().reason == "it has been ended"


def test_a_gpu_that_is_not_its_own_belongs_to_engines(tmp_path: Path) -> None:
    assert (spec_of(tmp_path).device, spec_of(tmp_path, gpus=0.25).device) == ("cpu", "auto")


def test_where_the_method_is_away_learning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learning.config.methods", dict)
    assert not parse_config(BOTH).learning.enabled
    with pytest.raises(InputError, match="this installation is without the method learning"):
        parse_config([*BOTH, "--learning", "true"])

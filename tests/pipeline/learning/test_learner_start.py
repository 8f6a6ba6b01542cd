"""What a learner begins with, and what of a cluster is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.embedded import EMBEDDED_HEADS
from pipeline.cluster.shares import Cluster, Node
from pipeline.errors import InputError
from pipeline.generate.generate_config import GenerateConfig, parse_config
from pipeline.io.files import locate
from pipeline.learning.job_learner import beside_learner, tokens_left
from pipeline.learning.learner_spec import beginning, put_head
from pipeline.learning.learning_config import LearningConfig
from pipeline.output.output_folder import OutputFolder
from pipeline.progress.job_progress import Progress
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
    file.write_text(config.as_yaml())
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
        ("--learning true --engine.nodes 0", "engine.nodes 0 drafts nothing"),
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
    assert beginning(new, output).here(str(here)).folder == str(here)
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

"""What an operator has to say before anybody's requests are learnt from, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter.engine.config import EngineSettings
from pipeline.cluster.ray_cluster import Cluster, Node
from pipeline.engines.models import EngineSpec
from pipeline.errors import InputError
from pipeline.learning.config import LearnerSpec
from pipeline.serving.application import application
from pipeline.serving.config import ApplicationConfig, ServingLearning, parse_application, parse_config
from pipeline.serving.job import check_models
from tests.support.paths import ROOT

CLUSTER = Cluster((Node(4.0, 2.5),), may_grow=False)


def test_learning_is_asked_for_on_the_command_line_or_in_a_file(tmp_path: Path) -> None:
    assert not parse_config([]).learning.enabled
    arguments = ["--learning", "true", "--learning.agreed", "all", "--learning.folder", "head", "--learning.share", "1"]
    given = parse_config(arguments).learning
    assert (given.enabled, given.agreed, given.folder, given.share) == (True, "all", "head", 1)
    file = tmp_path / "serve.yaml"
    file.write_text("learning: {enabled: true, agreed: all, folder: head, share: 1}\n")
    assert parse_config(["--config", str(file)]).learning == given
    assert parse_application(yaml.safe_load(file.read_text())).learning == given


def test_the_example_is_valid() -> None:
    config = parse_config(["--config", str(ROOT / "examples" / "serve-learning.yaml")])
    assert config.learning.enabled
    assert config.learning.agreed not in ("none", "all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder": "head"}, "nobody has agreed to be learnt from: set learning.agreed"),
        ({"agreed": "none", "folder": "head"}, "nobody has agreed to be learnt from: set learning.agreed"),
        ({"agreed": "all"}, "there is no folder for the head: set learning.folder"),
        ({"agreed": " ", "folder": "head"}, "learning.agreed is empty"),
        ({"agreed": "all", "folder": ""}, "learning.folder is empty"),
        ({"agreed": "all", "folder": "head", "gpus": 2}, "learning.gpus must be at most 1, not 2"),
    ],
)
def test_settings_that_are_missing_or_wrong_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_application({"learning": {"enabled": True, **settings}})


def test_the_head_must_have_a_part_in_the_drafter() -> None:
    learning = ServingLearning(enabled=True, agreed="all", folder="head")
    with pytest.raises(InputError, match="drafter ngram has no head that could learn"):
        ApplicationConfig(drafter="ngram", learning=learning)
    with pytest.raises(InputError, match=r"engine\.num_draft_tokens 0 drafts nothing"):
        ApplicationConfig(engine=EngineSettings(num_draft_tokens=0), learning=learning)


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    learning = ServingLearning(enabled=True, agreed="all", folder=str(tmp_path / "file" / "head"))
    config = parse_config(["--learning", "false"])
    with pytest.raises(InputError, match=r"learning\.folder .*file/head cannot be written to"):
        check_models(type(config)(learning=learning))
    (tmp_path / "run.json").touch()
    with pytest.raises(InputError, match="is the output of a job, and its head would be replaced"):
        check_models(type(config)(learning=replace(learning, folder=str(tmp_path))))


def test_replicas_and_learner_begin_with_the_same_and_a_plain_model_does_not_learn(tmp_path: Path) -> None:
    learning = ServingLearning(enabled=True, head="new", agreed="all", folder=str(tmp_path), gpus=0.5)
    config = ApplicationConfig(plain=True, learning=learning)
    ingress = application(config, CLUSTER, loopback=True)._bound_deployment
    engine, plain = (one._bound_deployment for one in ingress.init_args[0].values())
    (learner,) = ingress.init_kwargs["learner"]._bound_deployment.init_args
    assert isinstance(engine.init_args[0], EngineSpec)
    assert isinstance(learner, LearnerSpec)
    assert engine.init_args[0].learning == learner.beginning
    assert learner.beginning.start.folder is None
    assert plain.init_args[0].learning is None
    without = application(ApplicationConfig(plain=True), CLUSTER, loopback=True)._bound_deployment
    assert without.init_kwargs["learner"] is None
    # The learner's share of a GPU is none of theirs.
    with pytest.raises(InputError, match=r"2 × 1 GPUs for the replicas are more than the 1\.75 of this machine"):
        application(replace(config, learning=replace(learning, gpus=0.75)), CLUSTER, loopback=True)

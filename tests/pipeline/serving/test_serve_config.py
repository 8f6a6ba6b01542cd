from __future__ import annotations

from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineSettings
from jobs.serve import main
from pipeline.cluster.ray_cluster import Cluster, Node
from pipeline.errors import InputError
from pipeline.serving import application
from pipeline.serving.config import ApplicationConfig, ServeConfig, parse_application, parse_config
from pipeline.serving.job import check_models
from pipeline.serving.keys import ENVIRONMENT
from tests.support.paths import ROOT


def test_the_shipped_file_is_one_for_ray_serve() -> None:
    settings = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text(encoding="utf-8"))
    [app] = ServeDeploySchema.model_validate(settings).applications
    module, _, name = app.import_path.partition(":")
    assert (module, getattr(application, name)) == (application.__name__, application.build)
    config = parse_application(app.args)
    assert config == ApplicationConfig()
    engine = next(deployment for deployment in app.deployments if deployment.name == "Engine")
    assert engine.autoscaling_config["target_ongoing_requests"] == config.engine.max_num_seqs
    assert {deployment.name for deployment in app.deployments} == {"Ingress", "Engine"}


@pytest.mark.parametrize(("keys", "rule"), [("auto", "required"), ("required", "required"), ("none", "none")])
def test_a_file_for_ray_serve_needs_keys_where_the_ingress_runs(
    keys: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built without any, as a machine may do that is not the ingress's."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(application, "connect", lambda: Cluster((Node(4, 0),), may_grow=False))
    _, *settings = application.build({"keys": keys})._bound_deployment.init_args
    assert settings[:2] == [None, rule]


def test_settings_come_from_the_command_line() -> None:
    config = parse_config(["--model", "some/model", "--replicas.max", "3", "--replicas.gpus", "0.5", "--port", "81"])
    assert (config.served_name, config.replicas.min, config.replicas.max, config.replicas.gpus) == (
        "some/model",
        1,
        3,
        0.5,
    )
    assert config.engine.max_num_seqs == 32
    assert parse_config(["--model", str(EMBEDDED_BASE)]).served_name == "base"
    assert parse_config(["--model", f"{EMBEDDED_BASE}/", "--name", "pens"]).served_name == "pens"
    assert parse_config([]).served_name == "embedded"
    assert parse_config(["--engine.num_draft_tokens", "3"]).engine == EngineSettings(
        max_num_seqs=32, num_draft_tokens=3
    )


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.7", False),
        ("example.org", False),
    ],
)
def test_who_can_connect(host: str, loopback: bool) -> None:
    assert ServeConfig(host=host).loopback == loopback


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "unknown setting max_num_seq: did you mean engine.max_num_seqs?"),
        ({"config": "x"}, "unknown setting config"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs must be at least 1, not 0"),
        ({"engine": 3}, "engine must be a group of settings"),
        ({"limits": {"queue": "many"}}, "limits.queue must be an integer, not many"),
        ({"replicas": {"min": 2, "max": 1}}, "replicas.max must be at least 2, not 1"),
        ({"keys": "some"}, "keys must be one of auto, required, none, not some"),
        ({"keys": "none", "keys_file": "keys.txt"}, "keys is none, but keys_file is set"),
        ({"edge": {"sessions": -1}}, "edge.sessions must be at least 0, not -1"),
        ({"edge": {"draft_tokens": 257}}, "edge.draft_tokens must be at most 256, not 257"),
        (
            {"edge": {"sessions": 1}, "verifier": {"name": "typical"}},
            "edge.sessions is set, and the verifier is typical",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_application(settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "port must be at least 1"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--drafter", "/nowhere"], "drafter /nowhere is not a folder"),
        (["--keys_file", "/nowhere"], "keys_file /nowhere cannot be read: No such file or directory"),
        (["--host", "0.0.0.0"], "there is no API key: set DRAFTER_API_KEYS or keys_file, or set keys to none"),
        (["--keys", "required"], "there is no API key: set DRAFTER_API_KEYS or keys_file, or set keys to none"),
    ],
)
def test_a_mistake_costs_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # never somebody else's cluster
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr("pipeline.serving.job.will_start", lambda: True)  # earlier tests may have started Ray
    assert main(arguments) == 2
    error = capfd.readouterr().err.rstrip().rpartition("\n")[2]
    assert error.startswith("error: ")
    assert message in error


def test_the_default_temperature_is_said_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    check_models(ServeConfig())
    assert capsys.readouterr().err.startswith("a request without a temperature is sampled at 1 ")

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from pipeline.errors import InputError
from pipeline.serving import application
from pipeline.serving.serve_config import ApplicationConfig, parse_application, parse_config
from pipeline.serving.serve_job import main
from tests.support.paths import ROOT


def test_the_shipped_file_is_one_for_ray_serve() -> None:
    settings = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text(encoding="utf-8"))
    [app] = ServeDeploySchema.model_validate(settings).applications
    module, _, name = app.import_path.partition(":")
    assert (module, getattr(application, name)) == (application.__name__, application.build)
    config = parse_application(app.args)
    assert config == ApplicationConfig()
    engine = next(deployment for deployment in app.deployments if deployment.name == "Engine")
    assert engine.max_ongoing_requests == config.engine.slots + config.limits.queue
    assert engine.autoscaling_config["target_ongoing_requests"] == config.engine.slots
    assert {deployment.name for deployment in app.deployments} == {"Ingress", "Engine"}


def test_settings_come_from_the_command_line() -> None:
    config = parse_config(["--model", "some/model", "--replicas.max", "3", "--replicas.gpus", "0.5", "--port", "81"])
    assert (config.served_name, config.replicas.min, config.replicas.max, config.replicas.gpus) == (
        "some/model",
        1,
        3,
        0.5,
    )
    assert config.engine.slots == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 3}, "Option 'slots' is not accepted"),
        ({"config": "x"}, "Option 'config' is not accepted"),
        ({"engine": {"slots": 0}}, "engine.slots must be at least 1, not 0"),
        ({"engine": 3}, "engine must be a group of settings"),
        ({"limits": {"queue": "many"}}, "limits.queue must be an integer, not many"),
        ({"replicas": {"min": 2, "max": 1}}, "replicas.max must be at least 2, not 1"),
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
    ],
)
def test_a_mistake_costs_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capfd.readouterr().err.rstrip().rpartition("\n")[2]
    assert error.startswith("error: ")
    assert message in error

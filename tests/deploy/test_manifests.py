"""What clusters are made from passes its validators, and agrees with the rest of the project."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from pipeline.generate.config import parse_config
from pipeline.serving.config import parse_application
from pipeline.training.config import parse_config as parse_training
from tests.deploy.manifests import MANIFESTS, admitted, load, pod_templates, ray_cluster
from tests.support.paths import ROOT

CLUSTER = ROOT / "cluster.yaml"
LOCKED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60])
COMMANDS = {"jobs.generate": parse_config, "jobs.train": parse_training}


def validator(kind: str) -> jsonschema.Draft202012Validator:
    """KubeRay's schema of a kind, as the API server would apply it, but that it refuses unknown fields."""
    schema = json.loads(Path(__file__).with_name("kuberay-crd.json").read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})


def test_the_cluster_launcher_takes_cluster_yaml() -> None:
    config = prepare_config(yaml.safe_load(CLUSTER.read_text(encoding="utf-8")))
    validate_config(config)
    types = config["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    workers = {name: kind for name, kind in types.items() if name != "head"}
    assert all(kind["min_workers"] == 0 and kind["resources"]["GPU"] for kind in workers.values())
    markets = {name: kind["node_config"].get("InstanceMarketOptions") for name, kind in workers.items()}
    assert markets == {"gpu_spot": {"MarketType": "spot"}, "gpu_on_demand": None}
    assert workers["gpu_spot"]["priority"] > workers["gpu_on_demand"].get("priority", 0)
    assert config["max_workers"] >= sum(kind["max_workers"] for kind in workers.values())


@pytest.mark.parametrize("change", [{"target_utilization_fraction": 0.8}, {"head_node": {"InstanceType": "x"}}])
def test_the_launcher_would_refuse_what_it_does_not_know(change: dict[str, Any]) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_config(prepare_config({**yaml.safe_load(CLUSTER.read_text(encoding="utf-8")), **change}))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_would_take_the_manifests(path: Path) -> None:
    manifest, policy = load(path)
    assert manifest["apiVersion"] == "ray.io/v1"
    for document in (manifest, policy):
        validator(document["kind"]).validate(document)

    cluster = ray_cluster(manifest)
    assert cluster["rayVersion"] == LOCKED["ray"]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert all(
        group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in cluster["workerGroupSpecs"]
    )
    for template in pod_templates(manifest):
        (container,) = template["spec"]["containers"]
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= {
            volume["name"] for volume in template["spec"].get("volumes", ())
        }
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]  # Ray takes the limits for what there is


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("generate.yaml", ("rayClusterSpec", "autoscalerOptions", "version"), "v3"),
        ("generate.yaml", ("rayClusterSpec", "headGroupSpec", "rayStartParam"), {}),
        ("train.yaml", ("backoffLimit",), "often"),
        ("serve.yaml", ("rayClusterConfig", "workerGroupSpecs"), [{"groupName": "gpu"}]),
    ],
)
def test_kubernetes_would_refuse_mistakes(name: str, place: tuple[str, ...], value: Any) -> None:
    manifest, _ = load(ROOT / "deploy" / "kuberay" / name)
    where = manifest["spec"]
    for step in place[:-1]:
        where = where[step]
    where[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validator(manifest["kind"]).validate(manifest)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_only_who_has_the_token_may_use_ray(path: Path) -> None:
    """KubeRay gives the token to its pods where `authOptions` say so; without a token, Ray refuses this mode."""
    manifest, _ = load(path)
    assert ray_cluster(manifest)["authOptions"] == {"mode": "token"}
    for template in pod_templates(manifest):
        (container,) = template["spec"]["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]


def test_whoever_starts_ray_by_hand_is_told_of_the_token() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (CLUSTER, *(ROOT / "docs").glob("*.md"))]
    commands = [text[: found.end()].splitlines()[-2:] for text in texts for found in re.finditer("ray start --", text)]
    assert len(commands) >= 4
    for command in commands:
        assert "RAY_AUTH_MODE=token" in "".join(command)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_only_who_must_may_connect(path: Path) -> None:
    manifest, policy = load(path)
    mine = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    for template in pod_templates(manifest):
        assert mine.items() <= template["metadata"]["labels"].items()
    gcs, dashboard, client, worker, serve = 6379, 8265, 10001, 31_000, 8000
    for port in (gcs, dashboard, client, worker, serve):
        assert admitted(policy, mine, port)
        assert admitted(policy, {"app": "somebody"}, port) == (port == serve and manifest["kind"] == "RayService")
        assert not admitted(policy, mine, port, same_namespace=False) or port == serve
    operator = {"app.kubernetes.io/component": "kuberay-operator"}
    submitter = {"batch.kubernetes.io/job-name": manifest["metadata"]["name"]}  # the pod that runs `ray job submit`
    assert admitted(policy, operator, dashboard, same_namespace=False)
    assert admitted(policy, submitter, dashboard) == (manifest["kind"] == "RayJob")
    for port in (gcs, client, worker):
        assert not admitted(policy, operator, port)
        assert not admitted(policy, submitter, port)


@pytest.mark.parametrize("path", [p for p in MANIFESTS if p.name != "serve.yaml"], ids=lambda path: path.name)
def test_the_jobs_take_their_commands(path: Path) -> None:
    python, dash_m, job, *arguments = shlex.split(load(path)[0]["spec"]["entrypoint"])
    assert (python, dash_m) == ("python", "-m")
    COMMANDS[job](arguments)


def test_serve_takes_its_configuration() -> None:
    config = yaml.safe_load(load(ROOT / "deploy" / "kuberay" / "serve.yaml")[0]["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    module, _, builder = str(application.import_path).partition(":")
    assert callable(getattr(importlib.import_module(module), builder))
    assert parse_application(application.args).replicas.gpus == 1


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_is_built_from_what_is_locked_by_a_user_without_rights() -> None:
    steps = dockerfile()
    assert steps[0][0] == "FROM"
    assert re.search(r":\S+$", steps[0][1]), "an image without a tag"
    known = {"FROM", "ARG", "RUN", "USER", "WORKDIR", "ENV", "COPY"}
    assert {name for name, _ in steps} <= known
    assert "USER" in [name for name, _ in steps]
    for name, arguments in steps:
        for source in shlex.split(arguments)[:-1] if name == "COPY" else ():
            assert source.startswith("--") or (ROOT / source).exists(), source
        for command in arguments.split("&&") if name == "RUN" else ():
            if "pip install" in command:
                assert "--constraint constraints.txt" in command
            if "apt-get install" in command:
                assert "--no-install-recommends" in command
                assert "rm -rf /var/lib/apt/lists" in arguments

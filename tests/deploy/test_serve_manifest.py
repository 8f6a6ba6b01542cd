"""The endpoint as Kubernetes would run it: the manifest's own configuration, on nodes with its pods' environments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from examples.local_cluster import LocalCluster, NodeType
from pipeline.cluster.ray_cluster import LOOPBACK, free_ports
from tests.deploy.manifests import environment, load, pod_templates
from tests.pipeline.conftest import model as model
from tests.support.paths import ROOT
from tests.support.prepared_workers import prepared_workers
from tests.support.waiting import PATIENCE, wait_until

MANIFEST, _ = load(ROOT / "deploy" / "kuberay" / "serve.yaml")
KEY = "sk-of-the-secret"
SECRETS = {("drafter", "api-keys"): f"sk-another,{KEY}"}
CHAT = "/v1/chat/completions"


@dataclass
class Deployed:
    """A cluster of two nodes, which runs what it is given.

    Args:
        cluster: It.
        folder: For files.
        port: Where Ray Serve listens.
        state: What Ray Serve says of the deployment; None before there is one.
    """

    cluster: LocalCluster
    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    state: dict[str, Any] | None = None

    def serve(self, *arguments: str) -> str:
        """Run Ray Serve's command line against the cluster; return what it prints."""
        command = [str(Path(sys.executable).parent / "serve"), *arguments, "--address", self.cluster.jobs_address]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**self.cluster.environment, "PYTHONPATH": str(ROOT)}

    def deploy(self, model: Path) -> dict[str, Any]:
        """Deploy the manifest's configuration with a tiny model, once; return what Ray Serve says of it."""
        if self.state is not None:
            return self.state
        config = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
        (application,) = config["applications"]
        application["args"] |= {
            "model": str(model),
            "name": "tiny",
            "engine": {"max_num_seqs": 4, "num_draft_tokens": 4},
        }
        config["http_options"] = {"host": LOOPBACK, "port": self.port}
        file = self.folder / "serve.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self.serve("deploy", str(file))
        self.state = self.wait()
        return self.state

    def refusal(self, *arguments: Any) -> str:
        """Run `jobs.serve` on the cluster; return the last line of its errors."""
        command = [sys.executable, "-m", "jobs.serve", *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2, done.stderr
        return done.stderr.strip().rpartition("\n")[2]

    def wait(self) -> dict[str, Any]:
        """Wait until the deployment has come to an end; return what Ray Serve says of the application."""

        address, token = (self.environment[f"RAY_{name}"] for name in ("API_SERVER_ADDRESS", "AUTH_TOKEN"))
        address += "/api/serve/applications/"

        def ended() -> dict[str, Any] | None:
            # What `serve status` prints, without a process for each look.
            said = httpx2.get(address, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)
            found: dict[str, Any] = said.raise_for_status().json()["applications"]["drafter"]
            return found if found["status"] in ("RUNNING", "DEPLOY_FAILED") else None

        return wait_until(ended, "the deployment", pause=1)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DRAFTER_API_KEYS", raising=False)
        head, worker = (environment(template["spec"]["containers"][0], SECRETS) for template in pod_templates(MANIFEST))
        del worker["HF_HOME"]  # a volume that is not here
        with prepared_workers() as workers:
            code = {"PYTHONPATH": f"{workers.environment['PYTHONPATH']}:{ROOT}"}
            node = NodeType(cpus=2, gpus=1, environment=worker | code)
            with LocalCluster([node], head_environment=head | code) as cluster:
                yield Deployed(cluster, tmp_path_factory.mktemp("deployed"))


@pytest.mark.slow
def test_the_manifest_asks_for_the_keys_of_its_secret(deployed: Deployed, model: Path) -> None:
    found = deployed.deploy(model)
    assert found["status"] == "RUNNING", found
    body = {"model": "tiny", "messages": [{"role": "user", "content": "how many"}], "max_tokens": 3}
    address = f"http://{LOOPBACK}:{deployed.port}"
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer sk-wrong"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
    ):
        assert httpx2.post(address + CHAT, json=body, headers=headers, timeout=PATIENCE).status_code == status
        assert httpx2.get(f"{address}/v1/models", headers=headers, timeout=PATIENCE).status_code == status
    well = {"status": "ok", "replicas": {"tiny": 1}, "connections": None}  # Serve's own proxy listens
    assert httpx2.get(f"{address}/health", timeout=PATIENCE).json() == well


@pytest.mark.slow
def test_a_second_endpoint_is_told_where_ray_serve_listens(deployed: Deployed, model: Path) -> None:
    deployed.deploy(model)
    error = deployed.refusal("--model", model, "--port", free_ports(1)[0])
    assert f"Ray Serve runs on this cluster already, and listens on {LOOPBACK}:{deployed.port}" in error


@pytest.mark.slow
def test_the_error_of_an_ingress_is_that_of_the_job(deployed: Deployed, model: Path) -> None:
    """The last test of the cluster: it takes the application down."""
    deployed.deploy(model)
    error = deployed.refusal(
        "--model", model, "--port", deployed.port, "--keys_file", "/nowhere", "--engine.num_draft_tokens", 4
    )
    assert error.startswith("error: keys_file /nowhere cannot be read: No such file or directory (the ingress runs on ")


def test_a_pod_does_not_start_without_the_secret_of_the_keys() -> None:
    for template in pod_templates(MANIFEST):
        (container,) = template["spec"]["containers"]
        with pytest.raises(LookupError, match="drafter/api-keys"):
            environment(container, {})
